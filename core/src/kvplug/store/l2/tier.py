"""What an L2 tier has to do: keep values by key, somewhere beyond one worker's memory.

A tier is written with plain blocking calls. `kvplug.store.l2.client` makes them asynchronous: it runs them on threads,
gives up on those that take too long, leaves a tier that fails alone for a while, and never reuses a buffer before the
call that has it returned. So a tier needs no threads, no retries and no back-off of its own.

Tiers are entry points of the group `kvplug.stores`: the name is what the setting `l2` says, the value
`package.module:Class`, of a subclass of `Tier`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplug.settings import Settings

__all__ = ["Tier", "TierError", "TierTimeoutError", "Usage"]


class TierError(Exception):
    """A tier can't do what it was asked for: it is down, full, or says something unintelligible.

    The message is one sentence, which names the tier's place (host and port, directory), and never a secret.
    """


class TierTimeoutError(TierError):
    """A tier didn't answer in time."""


@dataclass(frozen=True)
class Usage:
    """What a tier holds; None for what it doesn't know."""

    #: Bytes, with whatever else counts against the capacity.
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    entries: int | None = None


class Tier(ABC):
    """Keeps values by key.

    A *key* is 1 to 64 bytes, any bytes. A *value* is any bytes, up to `max_value_bytes`; the tier doesn't look inside.
    What it returns may be stale or damaged: whoever reads it checks (`kvplug.store.l2.value`). A value is either found
    whole or not at all, as far as the tier can tell, and two writers of one key never mix their bytes.

    Calls come from up to `max_calls` threads at once, and must be safe then. `timeout` is in seconds: a call that can
    end by itself in that time does, with `TierTimeoutError`. Whoever calls has a deadline of its own, so a call that
    can't is no disaster, but costs a thread until it ends. A missing key is never an error. A batch that fails in part
    may raise, or report the failed keys as misses; after an exception all of the batch counts as failed.

    Memory for values is given as `memoryview` of format "B", contiguous, of the worker's slab or of scratch memory. A
    tier reads and writes it during the call only.
    """

    #: What the setting `l2` and the metrics call it.
    name: ClassVar[str]
    #: The tier's settings, each beginning with the tier's name, or None if it has none.
    Settings: ClassVar[type[Settings] | None] = None
    #: Calls that it can make good use of at the same time.
    max_calls: int = 4

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it is, for messages: `127.0.0.1:6379`, a directory. Never with a secret."""

    @abstractmethod
    def open(self, *, max_value_bytes: int, timeout: float) -> None:
        """Connect, or make ready. Called before anything else, and again after it failed.

        Raises:
            TierError: It can't be used now. The message says why, and where.

        """

    def register(self, memory: memoryview) -> None:  # noqa: B027 - most tiers have no use for it
        """Take notice of the memory of most values, for tiers that must register what they read into and write from.

        Called once after each `open` that worked. The memory stays until `close` has returned.

        Raises:
            TierError: It can't be registered.

        """

    @abstractmethod
    def exists(self, keys: Sequence[bytes], timeout: float) -> Sequence[bool]:
        """Return for each key whether it is there. A value may still be gone when it is asked for.

        Keys are looked up that follow one that is missing, too: of recurrent state, not every block is stored.
        """

    @abstractmethod
    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], timeout: float) -> Sequence[int | None]:
        """Read values into buffers.

        Args:
            keys: What to read.
            buffers: Where to, one for each key: as long as the longest value that may come, which may be shorter.
            timeout: Seconds.

        Returns:
            For each key the value's length in bytes, or None if it isn't there. A value that doesn't fit isn't there. A
            buffer whose key isn't there may have been written to.

        """

    @abstractmethod
    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], timeout: float) -> Sequence[bool]:
        """Write values. A key that is there may be left as it is: equal keys have equal contents.

        Returns:
            For each key whether it is there now, as far as the tier knows. False where there was no room for it.

        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes], timeout: float) -> None:
        """Remove keys; those that aren't there are ignored."""

    @abstractmethod
    def usage(self, timeout: float) -> Usage:
        """Return what it holds."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it has: connections, descriptors, threads.

        May be called again, and while calls are under way, which then end.
        """
