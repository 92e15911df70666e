"""Starts the three programs, watches them, and stops them in the right order."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.text import Text

from kvplug.cli.console import console
from kvplug_pd_reuse.cli.health import is_well
from kvplug_pd_reuse.cli.processes import Guard, Process, how_it_ended
from kvplug_pd_reuse.cli.programs import Program

__all__ = ["AskedToEndError", "ProgramError", "Stack", "stack"]

_STYLES = {"prefill": "cyan", "decode": "magenta", "router": "green"}

# Seconds between two looks at everything.
_TICK = 0.1

# Lines of a log that an error shows.
_SHOWN = 20


class AskedToEndError(Exception):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        #: The signal.
        self.number = number


class ProgramError(Exception):
    """A program ended, or didn't become ready: one sentence, and the end of its log."""

    def __init__(self, sentence: str, process: Process) -> None:
        super().__init__(sentence)
        #: The log's file.
        self.log = process.log
        #: What its last lines are.
        self.lines = process.last_lines(_SHOWN)
        #: The error that it may have ended for, if there is one in the log.
        self.cause = process.first_error()


class Stack:
    """Programs that run together: if one ends, all do."""

    def __init__(self, folder: Path, guard: Guard, patience: float, *, verbose: bool) -> None:
        self._folder = folder
        self._guard = guard
        self._patience = patience
        self._verbose = verbose
        self._running: list[tuple[Program, Process]] = []
        self._signals: list[int] = []

    def take_signal(self, number: int, _: object) -> None:
        """Note a signal; a handler that did more could interrupt anything."""
        self._signals.append(number)

    def start(self, program: Program) -> None:
        """Start a program, and return before it is ready."""
        log = self._folder / f"{program.name}.log"
        self._running.append((program, Process(program.name, program.command, program.environ, log, self._guard)))

    def wait_until_ready(self, programs: Sequence[Program], timeout: float) -> None:
        """Wait for programs that were just started, and say of each when it is ready.

        Raises:
            AskedToEndError: A signal came.
            ProgramError: One ended, or wasn't ready in time.

        """
        start = time.monotonic()
        waiting = list(programs)
        while waiting:
            self._look(" while it was starting")
            for program in [program for program in waiting if is_well(program.url + program.ready)]:
                waiting.remove(program)
                console().print(f"{program.name} is ready after {time.monotonic() - start:.0f} s.")
            if waiting and time.monotonic() - start > timeout:
                (process,) = [process for program, process in self._running if program is waiting[0]]
                raise ProgramError(
                    f"{waiting[0].title} wasn't ready after {timeout:g} s: see why, or give it more with "
                    "--startup-timeout.",
                    process,
                )

    def watch(self) -> None:
        """Watch the programs until a signal comes or one of them ends.

        Raises:
            AskedToEndError: A signal came.
            ProgramError: One ended.

        """
        while True:
            self._look("")

    def stop(self) -> None:
        """End all programs: what was started last first, and the two engines together. A second signal is enough."""
        asked = len(self._signals)
        for stage in (self._running[2:], self._running[:2]):
            for _, process in stage:
                process.terminate()
            deadline = time.monotonic() + self._patience
            while any(process.status is None for _, process in stage):
                if time.monotonic() > deadline or len(self._signals) > asked:
                    break
                self._tick()
            for _, process in stage:
                process.kill()
        self._echo()

    def _look(self, when: str) -> None:
        self._tick()
        for program, process in self._running:
            if (status := process.status) is not None:
                self._echo()
                raise ProgramError(f"{program.title} ended with {how_it_ended(status)}{when}.", process)
        if self._signals:
            raise AskedToEndError(self._signals[0])

    def _tick(self) -> None:
        time.sleep(_TICK)
        self._echo()

    def _echo(self) -> None:
        if self._verbose:
            out = console()
            for _, process in self._running:
                prefix = Text(f"{process.name} | ", style=_STYLES[process.name])
                for line in process.new_lines():
                    out.print(prefix + Text(line), soft_wrap=True)


@contextmanager
def stack(folder: Path, patience: float, *, verbose: bool) -> Iterator[Stack]:
    """Give a stack whose programs end with the context, and with this process, however it ends.

    Args:
        folder: Where logs go, one file for each program.
        patience: Seconds that running requests get to finish, and then the engines to end.
        verbose: Print the programs' lines, too.

    """
    guard = Guard(patience)
    made = Stack(folder, guard, patience, verbose=verbose)
    caught = [signal.SIGINT, signal.SIGTERM]
    # Under nohup it stays ignored.
    caught += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    before = {number: signal.signal(number, made.take_signal) for number in caught}
    try:
        yield made
    finally:
        try:
            made.stop()
        finally:
            guard.close()
            for number, handler in before.items():
                signal.signal(number, handler)
