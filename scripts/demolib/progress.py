"""Shows what the demo is doing: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Advance", "stage"]

# Seconds between two signs of life where there is no terminal.
_INTERVAL = 10.0

#: Says that there is progress: by how much, and with a word on it.
Advance = Callable[[int, str], None]


@contextlib.contextmanager
def stage(console: Console, title: str, total: int | None = None) -> Iterator[Advance]:
    """Show one stage of the demo.

    Args:
        console: Where to show it.
        title: What is being done.
        total: Number of its parts, if that is known.

    Yields:
        A function to call when a part is done, or to show that things go on.

    """
    with _bar(console, title, total) if console.is_terminal else _lines(console, title, total) as advance:
        yield advance


@contextlib.contextmanager
def _bar(console: Console, title: str, total: int | None) -> Iterator[Advance]:
    counting = [] if total is None else [BarColumn(bar_width=16), MofNCompleteColumn()]
    columns = [SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), *counting, TimeElapsedColumn()]
    with Progress(*columns, TextColumn("[dim]{task.fields[note]}"), console=console) as progress:
        task = progress.add_task(title, total=total, note="")
        yield lambda parts, note: progress.update(task, advance=parts, note=note)
        progress.update(task, total=total or 1, completed=total or 1, note="")


@contextlib.contextmanager
def _lines(console: Console, title: str, total: int | None) -> Iterator[Advance]:
    started = shown = time.monotonic()
    done = 0
    console.print(f"{title} …", soft_wrap=True)

    def advance(parts: int, note: str) -> None:
        nonlocal shown, done
        done += parts
        now = time.monotonic()
        if now - shown >= _INTERVAL and done != total:
            shown = now
            count = "" if total is None else f"{done} of {total} "
            console.print(f"  {count}{note} ({now - started:.0f} s)")

    yield advance
    console.print(f"  done in {time.monotonic() - started:.0f} s")
