"""The tier `mooncake`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvplug.errors import ConfigError
from kvplug.log import RateLimited, get_logger
from kvplug.store.l2.mooncake.addresses import own_address, reach
from kvplug.store.l2.mooncake.codes import (
    GONE,
    IN_USE,
    KEPT,
    MISSING,
    NO_SPACE,
    REFUSED,
    TIMED_OUT,
    is_unanswered,
    name_of,
)
from kvplug.store.l2.mooncake.connection import Connection, addresses_of
from kvplug.store.l2.mooncake.library import bound_calls, load
from kvplug.store.l2.mooncake.settings import MooncakeSettings
from kvplug.store.l2.mooncake.usage import read_usage
from kvplug.store.l2.tier import Tier, TierError, TierTimeoutError, Usage

__all__ = ["MooncakeTier"]

logger = get_logger(__name__)

#: Other users of the same store have keys of their own.
_PREFIX = "kvplug-"

#: Seconds that a call may take at most, also where opening may take longer.
_LONGEST_CALL = 2.0

#: Deleted keys that the store keeps for a while; more than these are forgotten, and found again.
_MAX_DELETED = 4096


class MooncakeTier(Tier):
    """Keeps values in the memory of the storage nodes of a Mooncake Store.

    Values go straight from the given memory to a node, and back: batches of one call, without a copy in this process.
    A lookup or a read leases a key, so that the store doesn't evict it between the two; the lease's length is the
    master's (`--default_kv_lease_ttl`). A leased key isn't removed. `delete` remembers those: this tier doesn't find
    them any more, and replaces the value when the key is put again.

    Calls end by Mooncake's own limits (see `library.bound_calls`), not by the time-out that they are given: each answer
    of the master, and each pause of a transfer, may take two seconds, or as long as `open` could take if that is less.

    Attributes:
        under_replicated: Values put since the tier was made that got fewer copies than `mooncake_replicas`.

    """

    name = "mooncake"
    Settings = MooncakeSettings

    def __init__(self, settings: MooncakeSettings | None = None) -> None:
        """Import Mooncake's client.

        Raises:
            ConfigError: `mooncake_master` isn't set, or the client, or a library that it needs, isn't installed.

        """
        settings = settings or MooncakeSettings()
        if settings.mooncake_master is None:
            raise ConfigError(
                "The tier mooncake needs the address of Mooncake's master: set mooncake_master to, for example, "
                "'10.0.0.5:50051'."
            )
        self._master: str = settings.mooncake_master
        self._settings = settings
        self._library = load()
        self._replication = self._library.ReplicateConfig()
        self._replication.replica_num = settings.mooncake_replicas
        self._warnings = RateLimited(logger)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        # Whether the last answer was that the master doesn't answer: the next call asks whether it listens.
        self._doubtful = False
        self._deleted: OrderedDict[bytes, None] = OrderedDict()
        self.under_replicated = 0

    @property
    def place(self) -> str:
        """The master's host and port."""
        return self._master

    def open(self, *, max_value_bytes: int, timeout: float) -> None:  # noqa: ARG002 - values may have any length
        """Become a client of the store.

        Raises:
            TierError: The master can't be reached, or doesn't answer.

        """
        self.close()
        # Mooncake's own attempts take four seconds where nobody listens.
        reach(self._master, "Mooncake's master", timeout)
        bound_calls(min(timeout, _LONGEST_CALL))
        connection = Connection(
            self._library,
            master=self._master,
            host=own_address(self._master),
            protocol=self._settings.mooncake_protocol,
            devices=self._settings.mooncake_devices,
        )
        with self._lock:
            self._connection, self._doubtful = connection, False
            self._deleted.clear()

    def register(self, memory: memoryview) -> None:
        """Register the slab, which RDMA needs and TCP doesn't mind.

        Raises:
            TierError: It can't be registered.

        """
        self._open_connection().register(memory)

    def exists(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        """Look all keys up in one call, and lease those that are there."""
        found = [False] * len(keys)
        asked = self._not_deleted(keys)
        if asked:
            connection = self._ready(timeout)
            with connection.call() as store:
                codes = store.batch_is_exist([_name(keys[place]) for place in asked])
            self._check(codes, bad=[code for code in codes if code < 0])
            for place, code in zip(asked, codes, strict=True):
                found[place] = code == 1
        return found

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], timeout: float) -> list[int | None]:
        """Read values into buffers, all in one call. A value whose node fails is a miss, unless all that are there do.

        Raises:
            TierError: The master doesn't answer, or no value could be read though there are some.

        """
        lengths: list[int | None] = [None] * len(keys)
        asked = self._largest([place for place in self._not_deleted(keys) if buffers[place].nbytes], keys, buffers)
        if not asked:
            return lengths
        views = [buffers[place] for place in asked.values()]
        connection = self._ready(timeout)
        with connection.call(views) as store:
            codes = store.batch_get_into(
                [_name(key) for key in asked], addresses_of(views), [view.nbytes for view in views]
            )
        self._check(codes, bad=[code for code in codes if code < 0 and code not in GONE])
        for place, code in zip(asked.values(), codes, strict=True):
            lengths[place] = code if code >= 0 else None
        for place, key in enumerate(keys):
            first = asked.get(key, place)
            length = lengths[first]
            if first != place and length is not None and length <= buffers[place].nbytes:
                buffers[place][:length] = buffers[first][:length]
                lengths[place] = length
        return lengths

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], timeout: float) -> list[bool]:
        """Write values, all in one call; False where the store has no room, or another client writes the same key.

        Raises:
            TierError: The master doesn't answer, or no value could be written though there was room.

        """
        # Mooncake refuses empty values.
        asked = self._largest([place for place in range(len(keys)) if values[place].nbytes], keys, values)
        if not asked:
            return [False] * len(keys)
        connection = self._ready(timeout)
        with self._lock:
            replaced = [key for key in asked if key in self._deleted]
        new = [key for key in asked if key not in set(replaced)]
        codes: dict[bytes, int] = {}
        with connection.call([values[place] for place in asked.values()]) as store:
            for some, write in ((new, store.batch_put_from), (replaced, store.batch_upsert_from)):
                if some:
                    views = [values[asked[key]] for key in some]
                    names = [_name(key) for key in some]
                    done = write(names, addresses_of(views), [view.nbytes for view in views], self._replication)
                    codes.update(zip(some, done, strict=True))
            kept = [key for key, code in codes.items() if code in KEPT]
            if kept and self._settings.mooncake_replicas > 1:
                self._count_copies(store, [_name(key) for key in kept])
        self._check(list(codes.values()), bad=[code for code in codes.values() if code not in KEPT | REFUSED])
        with self._lock:
            for key in kept:
                self._deleted.pop(key, None)
        if NO_SPACE in codes.values():
            self._warnings.warning("full", "Mooncake's store at %s has no room, values are dropped.", self._master)
        return [bool(value.nbytes) and codes[key] in KEPT for key, value in zip(keys, values, strict=True)]

    def delete(self, keys: Sequence[bytes], timeout: float) -> None:
        """Remove keys. Those that are leased are only hidden from this tier, and go when the store evicts them."""
        if not keys:
            return
        with self._ready(timeout).call() as store:
            codes = store.batch_remove([_name(key) for key in keys])
        self._check(codes, bad=[code for code in codes if code not in {0, MISSING} | IN_USE])
        with self._lock:
            for key, code in zip(keys, codes, strict=True):
                if code in IN_USE:
                    self._deleted[key] = None
                    self._deleted.move_to_end(key)
            while len(self._deleted) > _MAX_DELETED:
                self._deleted.popitem(last=False)

    def usage(self, timeout: float) -> Usage:
        """Return what the whole store holds, by whomever, if `mooncake_metrics` says where to ask."""
        self._open_connection()
        metrics = self._settings.mooncake_metrics
        return Usage() if metrics is None else read_usage(metrics, timeout)

    def close(self) -> None:
        """Leave the store. Calls under way are waited for as long as they should take, then left to end alone."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(wait=2 * _LONGEST_CALL)

    def _open_connection(self) -> Connection:
        connection = self._connection
        if connection is None:
            raise TierError(f"The tier mooncake at {self._master} isn't open.")
        return connection

    def _ready(self, timeout: float) -> Connection:
        """Return the connection. Where the master didn't answer, look first: Mooncake's own attempts take seconds."""
        connection = self._open_connection()
        if self._doubtful:
            reach(self._master, "Mooncake's master", timeout)
        return connection

    def _not_deleted(self, keys: Sequence[bytes]) -> list[int]:
        """Return the places of keys that may be there."""
        with self._lock:
            return [place for place, key in enumerate(keys) if key not in self._deleted]

    @staticmethod
    def _largest(places: Sequence[int], keys: Sequence[bytes], memory: Sequence[memoryview]) -> dict[bytes, int]:
        """Return for each key its place with most memory: asked twice in a call, Mooncake fills one of two buffers."""
        chosen: dict[bytes, int] = {}
        for place in places:
            if memory[place].nbytes > memory[chosen.setdefault(keys[place], place)].nbytes:
                chosen[keys[place]] = place
        return chosen

    def _check(self, codes: Sequence[int], bad: Sequence[int]) -> None:
        """Raise if the master didn't answer, or if there are bad codes and no good ones."""
        unanswered = next((code for code in codes if is_unanswered(code)), None)
        self._doubtful = unanswered is not None
        if unanswered == TIMED_OUT:
            raise TierTimeoutError(f"Mooncake's master at {self._master} didn't answer in time.")
        if unanswered is not None:
            raise TierError(f"Mooncake's master at {self._master} can't be reached: start it.")
        if bad:
            problem = f"Mooncake's store at {self._master}: {name_of(bad[0])} for {len(bad)} of {len(codes)} keys"
            if not any(code >= 0 for code in codes):
                raise TierError(f"{problem}; look at the logs of its storage nodes.")
            self._warnings.warning(("keys", bad[0]), "%s; they count as misses.", problem)

    def _count_copies(self, store: Any, names: list[str]) -> None:
        """Notice values with too few copies: Mooncake stores what it can, and says nothing."""
        wanted = self._settings.mooncake_replicas
        copies = store.batch_get_replica_desc(names)
        fewer = sum(len(copies.get(name, ())) < wanted for name in names)
        if fewer:
            with self._lock:
                self.under_replicated += fewer
            self._warnings.warning(
                "copies",
                "Mooncake's store at %s keeps fewer than %d copies of %d values: it needs as many nodes with room.",
                self._master,
                wanted,
                fewer,
            )


def _name(key: bytes) -> str:
    return _PREFIX + key.hex()
