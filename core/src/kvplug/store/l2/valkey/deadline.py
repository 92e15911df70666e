"""Time that a call has left."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """A moment by which something has to be done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left; 0 if none are."""
        return max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> Deadline:
        """Return the deadline for a part of what has to be done: a share of what is left."""
        return Deadline(self.left() * share)
