"""The tier."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from kvplug.errors import ConfigError
from kvplug.log import get_logger
from kvplug.settings import Settings as AnySettings
from kvplug.store.l2.tier import Tier, TierError, Usage
from kvplug.store.l2.valkey.connection import Connection
from kvplug.store.l2.valkey.deadline import Deadline
from kvplug.store.l2.valkey.exchange import Command, exchange_at_once
from kvplug.store.l2.valkey.resp import ErrorReply, Reply, encode
from kvplug.store.l2.valkey.routing import Router
from kvplug.store.l2.valkey.settings import ValkeySettings
from kvplug.store.l2.valkey.topology import Topology, ask
from kvplug.store.l2.valkey.url import Address, parse_url

__all__ = ["ValkeyTier"]

logger = get_logger(__name__)

#: Longest value that a server takes (its `proto-max-bulk-len`).
_MAX_VALUE = 512 << 20
#: Bytes of values that may be under way from one server to one call: it keeps a reply in memory until it is sent.
_WINDOW_BYTES = 32 << 20
_USAGE = [Command((encode(b"INFO", b"memory"),)), Command((encode(b"DBSIZE"),))]


class ValkeyTier(Tier):
    """Keeps values in a Valkey or Redis server, or in a cluster of them.

    Raises:
        ConfigError: The URL is malformed, or a certificate can't be read.

    """

    name: ClassVar[str] = "valkey"
    Settings: ClassVar[type[AnySettings] | None] = ValkeySettings

    def __init__(self, settings: ValkeySettings | None = None) -> None:
        settings = settings or ValkeySettings()
        self._target = parse_url(settings.valkey_url.get_secret_value())
        self._tls = _tls(settings) if self._target.tls else None
        self._ttl = settings.valkey_ttl
        self._prefix = settings.valkey_prefix.encode()
        self._topology: Topology | None = None

    @property
    def place(self) -> str:
        """The hosts and ports of `valkey_url`."""
        return str(self._target)

    def open(self, *, max_value_bytes: int, timeout: float) -> None:
        """Connect, and see whether it is a cluster.

        Raises:
            TierError: It can't be reached, refuses the login, or takes no values as long as these.

        """
        self.close()
        if max_value_bytes > _MAX_VALUE:
            raise TierError(
                f"{self.place}: values of {max_value_bytes} bytes are longer than the {_MAX_VALUE} bytes that a Valkey "
                "server takes; use smaller blocks."
            )
        deadline = Deadline(timeout)
        topology = Topology(self._target, self._connection)
        try:
            topology.load(deadline)
            self._warn_of_no_eviction(topology, deadline)
        except BaseException:
            topology.close()
            raise
        self._topology = topology

    def exists(self, keys: Sequence[bytes], timeout: float) -> Sequence[bool]:
        """Look keys up, all at once."""
        commands = [Command((encode(b"EXISTS", key),), key) for key in self._keys(keys)]
        return [outcome == 1 for outcome in self._run(commands, timeout)]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], timeout: float) -> Sequence[int | None]:
        """Read values from the socket into the buffers."""
        commands = [
            Command((encode(b"GET", key),), key, into=buffer)
            for key, buffer in zip(self._keys(keys), buffers, strict=True)
        ]
        window = max(2, _WINDOW_BYTES // max([1, *map(len, buffers)]))
        # Another type of value under the key isn't ours.
        outcomes = self._run(commands, timeout, window, understood=("WRONGTYPE",))
        return [outcome if isinstance(outcome, int) else None for outcome in outcomes]

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], timeout: float) -> Sequence[bool]:
        """Write values from where they are to the socket."""
        expiry = () if self._ttl is None else (b"EX", b"%d" % self._ttl)
        tail = b"".join(b"\r\n$%d\r\n%b" % (len(item), item) for item in expiry) + b"\r\n"
        count = 3 + len(expiry)
        commands = [
            Command(
                (b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (count, len(key), key, len(value)), value, tail), key
            )
            for key, value in zip(self._keys(keys), values, strict=True)
        ]
        # OOM: there is no room, and the server evicts nothing.
        outcomes = self._run(commands, timeout, understood=("OOM",))
        return [outcome == b"OK" for outcome in outcomes]

    def delete(self, keys: Sequence[bytes], timeout: float) -> None:
        """Remove keys."""
        self._run([Command((encode(b"UNLINK", key),), key) for key in self._keys(keys)], timeout)

    def usage(self, timeout: float) -> Usage:
        """Return what the server has in memory, or the masters of the cluster together.

        The entries are all keys of the database, whoever wrote them.
        """
        deadline, topology = Deadline(timeout), self._opened()
        usages, problem = [], None
        for index, master in enumerate(topology.masters):
            share = 1 / (len(topology.masters) - index)
            try:
                usages.append(_usage(ask(master, _USAGE, deadline.part(share))))
            except TierError as error:
                problem = error
                topology.failed(master, error)
        if problem is not None and not usages:
            raise problem
        return Usage(
            _total([usage.used_bytes for usage in usages]),
            _total([usage.capacity_bytes for usage in usages]),
            _total([usage.entries for usage in usages]),
        )

    def close(self) -> None:
        """End the calls that are under way, and close the connections."""
        topology, self._topology = self._topology, None
        if topology is not None:
            topology.close()

    def _connection(self, address: Address) -> Connection:
        return Connection(address, self._target, self._tls)

    def _keys(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + key for key in keys]

    def _opened(self) -> Topology:
        topology = self._topology
        if topology is None:
            raise TierError(f"{self.place}: the tier isn't open.")
        return topology

    def _run(
        self, commands: Sequence[Command], timeout: float, window: int | None = None, understood: Sequence[str] = ()
    ) -> list[Reply | TierError]:
        deadline, topology = Deadline(timeout), self._opened()
        count = len(commands)
        router_window = window or max(1, count)
        if topology.clustered or not 0 < count <= router_window:
            return Router(topology, commands, router_window, understood).run(deadline)
        # One server: nobody has to be looked for, unless it says that there are others.
        node = topology.masters[0]
        try:
            replies = exchange_at_once(node, commands, deadline)
        except TierError as problem:
            topology.failed(node, problem)
            raise
        if any(type(reply) is ErrorReply for reply in replies):
            return Router(topology, commands, router_window, understood).run(deadline, node, replies)
        node.worked()
        return list(replies)

    def _warn_of_no_eviction(self, topology: Topology, deadline: Deadline) -> None:
        """Warn of a server that would fill up for good; the user may have no right to ask, which is no error."""
        reply, _ = ask(topology.masters[0], _USAGE, deadline)
        policy = _info(reply).get(b"maxmemory_policy", b"")
        capacity = _usage([reply, None]).capacity_bytes
        if self._ttl is not None or (capacity and policy.startswith(b"allkeys")) or not policy:
            return
        logger.warning(
            "%s: nothing makes room for new KV blocks (maxmemory is %s, maxmemory-policy %s). Set the server's "
            "maxmemory and maxmemory-policy allkeys-lru, or valkey_ttl.",
            self.place,
            capacity or "not set",
            policy.decode(errors="replace"),
        )


def _info(reply: Reply) -> dict[bytes, bytes]:
    lines = reply.splitlines() if isinstance(reply, bytes) else []
    return {name: value for name, colon, value in (line.partition(b":") for line in lines) if colon}


def _usage(replies: list[Reply]) -> Usage:
    memory, entries = replies
    figures: dict[bytes, int] = {}
    for name, value in _info(memory).items():
        with suppress(ValueError):
            figures[name] = int(value)
    return Usage(
        used_bytes=figures.get(b"used_memory"),
        capacity_bytes=figures.get(b"maxmemory") or None,  # 0 is no limit
        entries=entries if isinstance(entries, int) else None,
    )


def _tls(settings: ValkeySettings) -> ssl.SSLContext:
    ca, certificate, key = settings.valkey_tls_ca, settings.valkey_tls_cert, settings.valkey_tls_key
    name, file = "valkey_tls_ca", ca
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            name, file = "valkey_tls_cert", certificate
            # With a passphrase, or the terminal is asked for one.
            context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is one, too
        reason = error.strerror if not isinstance(error, ssl.SSLError) else error.reason
        raise ConfigError(
            f"Setting {name} is {str(file)!r}, which can't be used ({reason}); name a readable PEM file."
        ) from None
    return context


def _total(figures: Sequence[int | None]) -> int | None:
    """Add up; what isn't known of one isn't known of all."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None
