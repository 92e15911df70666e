"""Output for people: to a terminal as wide as it is, to anything else wide enough that lines aren't cut."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console

__all__ = ["console", "working"]

# Columns of a pipe or a file, where no width is given.
_WIDTH = 120


def console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or standard error as they are now."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else _WIDTH
    return Console(file=stream, width=width, highlight=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show, in a terminal, that something is being waited for."""
    with console(stderr=True).status(what) if sys.stderr.isatty() else nullcontext():
        yield
