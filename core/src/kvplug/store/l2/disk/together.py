"""Several files of one call at a time: a disk, and the copy into the page cache, are fast only so."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["THREADS", "together"]

#: Files at a time. Two keep the disk busy while bytes are copied; more gained nothing where it was measured.
THREADS = 2


def together(function: Callable[[int], object], number: int) -> tuple[int, BaseException | None]:
    """Call a function with 0, 1, … `number` - 1, a few calls at a time, until one of them raises.

    The threads are this call's own, and have ended when it returns: nothing to close, and a fork does no harm. Where
    none can be started, the calls are made one after another.

    Args:
        function: What to call.
        number: How many calls.

    Returns:
        How many of the first calls have succeeded, and what the next one has raised, None if there is none.

    """
    rest = iter(range(number))
    handing_out = threading.Lock()
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while not errors:
            with handing_out:
                index = next(rest, None)
            if index is None:
                return
            try:
                function(index)
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                errors[index] = error

    helpers: list[threading.Thread] = []
    try:
        for _ in range(min(THREADS, number) - 1):
            helper = threading.Thread(target=work, name="kvplug-l2-disk", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # the process may have no more threads, or is ending
                break
            helpers.append(helper)
        work()
    finally:
        # The files and the memory that they work with are given back after this.
        for helper in helpers:
            helper.join()
    # Calls are handed out in order: all before the first that has raised are over.
    first = min(errors, default=number)
    return first, errors.get(first)
