"""One call to a tier, as it is seen by whoever wants its result: it ends by its deadline, whatever the tier does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

__all__ = ["Operation", "Outcome"]

T = TypeVar("T")


class Outcome(Enum):
    """What became of an operation."""

    PENDING = "pending"
    DONE = "done"
    #: The call raised.
    FAILED = "failed"
    #: The call took too long. It may still be under way.
    TIMEOUT = "timeout"
    #: There was no call: cancelled, waited for its turn too long, or refused.
    DROPPED = "dropped"


class Operation(Generic[T]):
    """A call that waits for its turn, is under way, or has ended.

    The result is there when the operation has *ended*: by itself or because its time was up. Memory that the call was
    given may be reused only when it is *released*: that can be later, since a call can't be stopped. Whoever made the
    operation hears of that by `released`, exactly once, on any thread: with what the call returned, also if that was
    too late to be the result, or with None if it raised or was never made.

    Args:
        call: Makes the call; gets the seconds that it may take.
        otherwise: The result if the call fails or takes too long.
        timeout: Seconds that the call may take.
        patience: Seconds that it may wait for its turn.
        urgent: Whether somebody waits for it, so that it goes before those that nobody waits for.
        released: Called when the memory may be reused.

    """

    __slots__ = (
        "_ended",
        "call",
        "outcome",
        "patience",
        "released",
        "result",
        "started",
        "submitted",
        "timeout",
        "urgent",
    )

    def __init__(
        self,
        call: Callable[[float], T],
        *,
        otherwise: T,
        timeout: float,
        patience: float,
        urgent: bool = False,
        released: Callable[[T | None], None] | None = None,
    ) -> None:
        self.call = call
        self.result = otherwise
        self.timeout = timeout
        self.patience = patience
        self.urgent = urgent
        self.released = released
        self.outcome = Outcome.PENDING
        self.submitted = time.monotonic()
        self.started: float | None = None
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether the result is there."""
        return self._ended.is_set()

    @property
    def deadline(self) -> float:
        """When it ends at the latest, by `time.monotonic`: its turn must come, and then the call must return."""
        if self.started is None:
            return self.submitted + self.patience
        return self.started + self.timeout

    def wait(self, until: float | None = None) -> bool:
        """Wait for the result, and return whether it is there.

        Args:
            until: By `time.monotonic`; None waits for the operation's own deadline.

        """
        return self._ended.wait(None if until is None else max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """Let those who wait go on. For `kvplug.store.l2.calls`."""
        self._ended.set()
