"""Logging that ends up where vLLM's does, and doesn't flood it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable

__all__ = ["RateLimited", "get_logger"]


def get_logger(name: str) -> logging.Logger:
    """Return a logger whose lines come out with vLLM's.

    vLLM configures handlers for its own logger tree only, so a logger below it needs no handler of its own.

    Args:
        name: The module's `__name__`, for example `kvplug.dispatch`.

    """
    return logging.getLogger(f"vllm.{name}")


class RateLimited:
    """Warnings that may come once per request, but should be read once in a while.

    The first warning of a key is logged at once; those that follow within the interval are counted, and the
    next one that is logged says how many they were.
    """

    def __init__(self, logger: logging.Logger, seconds: float = 60.0) -> None:
        """Limit warnings on `logger` to one per key and `seconds`."""
        self._logger = logger
        self._seconds = seconds
        self._lock = threading.Lock()
        # key: (time of the last line, number of warnings suppressed since)
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def warning(self, key: Hashable, message: str, *args: object) -> None:
        """Log `message % args`, unless `key` was logged less than the interval ago."""
        now = time.monotonic()
        with self._lock:
            last, suppressed = self._seen.get(key, (float("-inf"), 0))
            if now - last < self._seconds:
                self._seen[key] = (last, suppressed + 1)
                return
            self._seen[key] = (now, 0)
        if suppressed:
            message += f" ({suppressed} more like this in between)"
        self._logger.warning(message, *args)
