"""Timing of functions side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["alternately"]


def alternately(functions: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Time functions in turns, so that whatever else the machine does hits them alike.

    Returns:
        For each function, the CPU seconds of this thread in each of its runs. (Not seconds on the wall: those of a copy
        in memory are the same, but for the time in which another process has the core.)

    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, seconds in zip(functions, times, strict=True):
            start = time.thread_time()
            function()
            seconds.append(time.thread_time() - start)
    return times
