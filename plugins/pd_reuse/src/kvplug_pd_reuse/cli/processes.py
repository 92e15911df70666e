"""The processes of `kvplug pd up`: each leads a group, writes to a log of its own, and never outlives the command."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvplug_pd_reuse.cli import guard

__all__ = ["Guard", "Process", "how_it_ended"]

# Runs its arguments as a command that gets SIGTERM when the process that started it dies, however it dies (Linux).
_LAUNCHER = (
    "import ctypes, os, sys; "
    "libc = ctypes.CDLL(None); "
    "hasattr(libc, 'prctl') and libc.prctl(1, 15); "  # PR_SET_PDEATHSIG, SIGTERM
    "os.execv(sys.argv[1], sys.argv[1:])"
)

# What colours a terminal, and is noise elsewhere.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

# What libraries of vLLM's print as an engine ends, a hundred lines of it, after the reason that it ended for.
_NOISE = re.compile(r"nanobind: | - leaked | - \.\.\. skipped remainder$|See https://nanobind\.|  warnings\.warn\(")

# The line of a traceback that has the error, as Python prints it or vLLM logs it.
_ERROR = re.compile(r"(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)")

# Lines, from the end, among which an error is looked for.
_FAR = 300


class Guard:
    """The process that ends the others if this one is killed (see `kvplug_pd_reuse.cli.guard`)."""

    def __init__(self, patience: float) -> None:
        # Not in this one's group, so that neither Ctrl-C nor a closed terminal reaches it.
        self._process = subprocess.Popen(  # noqa: S603 - our own file, no shell
            [sys.executable, "-I", "-S", guard.__file__, str(patience)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tell(self, what: str, pid: int) -> None:
        """Tell it of a process that has started (`+`) or is gone (`-`)."""
        assert self._process.stdin is not None
        # If it is gone itself, there is the launcher's signal left.
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{what}{pid}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


class Process:
    """A process with a log."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path, guard: Guard) -> None:
        #: What it is called in front of its lines.
        self.name = name
        #: What it prints, as it was printed.
        self.log = log
        self._guard = guard
        self._read = 0
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - a program that the user asked for, no shell
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the command's alone to handle
            )
        guard.tell("+", self._process.pid)

    @property
    def status(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs.

        Unlike `poll`, this leaves its id to it, and so the id of its group, which may have other members.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def terminate(self) -> None:
        """Ask it to end."""
        if self.status is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it, and whatever it started and is still in its group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._guard.tell("-", self._process.pid)
            self._process.wait()

    def new_lines(self) -> list[str]:
        """Return the whole lines that were printed since this was last asked."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self._read += end
        return _plain(text[:end])

    def last_lines(self, count: int) -> list[str]:
        """Return the end of what was printed, without what is always printed at the end."""
        return [line for line in _plain(self.log.read_bytes()) if not _NOISE.match(line)][-count:]

    def first_error(self) -> str | None:
        """Return the first error near the end of what was printed: those that follow are often about that one."""
        found = (_ERROR.match(line) for line in self.last_lines(_FAR))
        return next((match[1] for match in found if match), None)


def how_it_ended(status: int) -> str:
    """Return an exit status, or the name of the signal, as a sentence has it."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _plain(text: bytes) -> list[str]:
    return [_ESCAPES.sub("", line).rstrip() for line in text.decode("utf-8", errors="replace").splitlines()]
