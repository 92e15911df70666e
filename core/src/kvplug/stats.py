"""Counts of what kvplug did, per process."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["Stats"]


class Stats:
    """Named counts. Adding is safe from any thread."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]

    def get(self, name: str) -> float:
        """Return a count since the start."""
        with self._lock:
            return self._counts[name]

    def totals(self) -> dict[str, float]:
        """Return all counts since the start."""
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[str, float]:
        """Return what each count has grown by since the last call of this method, without those that haven't."""
        with self._lock:
            grown = {name: count - self._taken[name] for name, count in self._counts.items()}
            self._taken = Counter(self._counts)
        return {name: count for name, count in grown.items() if count}
