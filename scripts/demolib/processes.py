"""Processes that the demo starts, each the leader of a group, and that never outlive it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

__all__ = ["CAUGHT", "end", "exit_status", "spawn"]

#: Signals that ask the demo to end.
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Variables of the caller that would change what vLLM does.
_SETTINGS = re.compile(r"(VLLM|KVPLUG|AIBRIX|OMP|TORCH|TORCHDYNAMO|HF|TRANSFORMERS)_|PYTHONPATH$")

# Runs its arguments as a command that gets SIGTERM when the process that started it dies, however it dies (Linux).
_LAUNCHER = (
    "import ctypes, os, sys; "
    "libc = ctypes.CDLL(None); "
    "hasattr(libc, 'prctl') and libc.prctl(1, 15); "  # PR_SET_PDEATHSIG, SIGTERM
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def spawn(
    arguments: Sequence[str],
    build: Path,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    first: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start Python as the leader of a session of its own, so that Ctrl-C is the demo's alone to handle.

    Args:
        arguments: Python's arguments.
        build: Folder for vLLM's own files, and the current folder of the process.
        stdout: As `subprocess.Popen` takes it.
        stderr: The same.
        first: Folder that comes before all others on its path.

    """
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, sys.executable, *arguments],
        cwd=build,
        env=_environment(build) | ({} if first is None else {"PYTHONPATH": str(first)}),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Return a process's exit status, or minus the signal that ended it; None while it runs.

    Unlike `poll`, this leaves its id to it, and so the id of its group, which may have other members.
    """
    if process.returncode is not None:
        return process.returncode
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def end(processes: Sequence[subprocess.Popen[bytes]], timeout: float = 10) -> None:
    """End processes, and whatever they started. Those that have been ended before are left alone.

    Args:
        processes: What `spawn` returned.
        timeout: Seconds that they get to end by themselves.

    """
    # The id of one that was waited for may be somebody else's by now.
    running = [process for process in processes if process.returncode is None]
    with _uninterrupted():
        for process in running:
            process.terminate()
        deadline = time.monotonic() + timeout
        for process in running:
            while exit_status(process) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Have signals wait: what is being ended must not be left half ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment(build: Path) -> dict[str, str]:
    """Return an environment for vLLM: one thread, no network, nothing of the caller's own settings."""
    environment = {name: value for name, value in os.environ.items() if not _SETTINGS.match(name)}
    return environment | {
        "OMP_NUM_THREADS": "1",  # sums are split over threads, so results depend on their number
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM takes a thread per core, whatever is said above
        "TORCHDYNAMO_DISABLE": "1",  # else the first log-probabilities are compiled, for 11 to 40 s
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "KVPLUG_L1_SIZE_PER_RANK": "1GiB",
        "VLLM_SERVER_DEV_MODE": "1",  # gives the server /reset_prefix_cache
        "VLLM_CACHE_ROOT": str(build / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONSAFEPATH": "1",  # the current folder isn't on the path
        "HF_HUB_OFFLINE": "1",
    }
