"""A copy between a paged KV cache and a slab that may still be running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["DONE", "Event", "Transfer"]


class Event(Protocol):
    """A point in a device's queue of work; `torch.cuda.Event` is one."""

    def synchronize(self) -> object:
        """Block the host until the device has come to this point."""

    def query(self) -> bool:
        """Return whether the device has come to this point."""


class Transfer:
    """A copy that was started.

    What it wrote to the slab may be published, and what it read from the slab may be unpinned, only when it has ended.
    """

    def __init__(self, event: Event | None = None, hold: Callable[[], object] | None = None) -> None:
        """Describe a copy that ends at `event`; one that has ended already, if there is none.

        Args:
            event: When it has ended.
            hold: Lets later compute wait until the paged cache may be written, and read what was written; by default
                the host waits for the event.

        """
        self._event = event
        self._hold = hold

    def wait(self) -> None:
        """Block the host until the copy has ended."""
        if self._event is not None:
            self._event.synchronize()

    def hold_compute(self) -> None:
        """Let compute that is started later see what was written to the paged cache, and overwrite what was read."""
        if self._hold is not None:
            self._hold()
        else:
            self.wait()

    def done(self) -> bool:
        """Return whether the copy has ended, without waiting."""
        return self._event is None or self._event.query()


DONE = Transfer()
