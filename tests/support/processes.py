"""What servers and routers under test have in common: how they are started, where they listen, how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess

__all__ = ["HOST", "LAUNCHER", "free_ports", "stop_group"]

#: Where they listen.
HOST = "127.0.0.1"

#: Runs its arguments as a command that gets SIGTERM when the process that started it dies.
LAUNCHER = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM); "  # PR_SET_PDEATHSIG
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def free_ports(number: int) -> list[int]:
    """Return so many TCP ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def stop_group(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Ask a process that leads its group to end, and kill what is left of the group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
