"""Counts and durations of what kvplug did, per process."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

__all__ = ["MAX_OBSERVATIONS", "Stats"]

#: Durations of one name that are kept until someone takes them. There is about one a step, and vLLM takes them every
#: step; without a reader the oldest go, so that nothing grows.
MAX_OBSERVATIONS = 1024


class Stats:
    """Named counts, and lists of observed values. Adding is safe from any thread."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._observed: dict[str, deque[float]] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]

    def observe(self, name: str, value: float) -> None:
        """Keep one value, such as the seconds that something took, until `take`."""
        with self._lock:
            if name not in self._observed:
                self._observed[name] = deque(maxlen=MAX_OBSERVATIONS)
            self._observed[name].append(value)

    def get(self, name: str) -> float:
        """Return a count since the start."""
        with self._lock:
            return self._counts[name]

    def totals(self) -> dict[str, float]:
        """Return all counts since the start."""
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[str, Any]:
        """Return what is new since the last call of this method.

        Returns:
            By name, a number: what a count has grown by, if it has; or a list: the values that were observed.

        """
        with self._lock:
            new: dict[str, Any] = {
                name: count - self._taken[name] for name, count in self._counts.items() if count != self._taken[name]
            }
            if new:
                self._taken = Counter(self._counts)
            if self._observed:
                new.update((name, list(values)) for name, values in self._observed.items())
                self._observed = {}
        return new
