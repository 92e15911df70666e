"""Leaves a tier alone that fails, and finds out when it works again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Literal

__all__ = ["Breaker", "State"]

#: `closed`: calls go through. `open`: none do. `half_open`: one probe is under way, other calls don't go through.
State = Literal["closed", "open", "half_open"]

#: Back-offs differ by as much, so that engines that lost one server don't all come back to it at once.
_JITTER = 0.2


class Breaker:
    """A circuit breaker, which opens after several failures in a row and is closed again by a probe.

    Between probes it waits twice as long each time. A probe that works closes it on probation: the next failure opens
    it again and goes on doubling, until a call that somebody needed has worked.

    Safe from any thread. It makes no calls: somebody who sees `next_probe` does, and says what came of it.

    Args:
        failures: Failures in a row that open it.
        first: Seconds until the first probe.
        longest: Seconds between two probes at most.
        clock: Seconds, from any start.

    """

    def __init__(
        self,
        *,
        failures: int = 3,
        first: float = 1.0,
        longest: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures_to_open = failures
        self._first = first
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._backoff = first
        self._probe_at = 0.0
        self._state: State = "closed"
        #: Times that it has opened, the ends of failed probes not counted.
        self.opened = 0

    @property
    def state(self) -> State:
        """What it lets through."""
        return self._state

    def allows(self) -> bool:
        """Say whether calls go through."""
        return self._state == "closed"

    def next_probe(self) -> float | None:
        """Return when the next probe is due, by the clock; None while there is none to make."""
        with self._lock:
            return self._probe_at if self._state == "open" else None

    def start_probe(self) -> bool:
        """Take the one probe, if it is due. Whoever gets True must say how it ended."""
        with self._lock:
            if self._state != "open" or self._clock() < self._probe_at:
                return False
            self._state = "half_open"
            return True

    def succeeded(self) -> None:
        """Note a call that worked. One that was made before it opened changes nothing."""
        with self._lock:
            if self._state == "closed":
                self._failures = 0
                self._backoff = self._first

    def failed(self) -> bool:
        """Note a call that failed, and return whether that opened it."""
        with self._lock:
            if self._state != "closed":
                return False
            self._failures += 1
            if self._failures < self._failures_to_open:
                return False
            self._open()
            self.opened += 1
            return True

    def start_open(self) -> None:
        """Begin open, with the first probe due now: there is nothing to call yet."""
        with self._lock:
            self._state = "open"
            self._probe_at = self._clock()

    def probed(self, *, worked: bool) -> None:
        """Note how the probe ended."""
        with self._lock:
            if self._state != "half_open":
                return
            if worked:
                self._state = "closed"
                if self.opened:
                    self._failures = self._failures_to_open - 1
            else:
                self._open()

    def _open(self) -> None:
        self._state = "open"
        jitter = random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret
        self._probe_at = self._clock() + self._backoff * jitter
        self._backoff = min(self._backoff * 2, self._longest)
