"""A process that ends what `kvplug pd up` has started if that is killed. Run as a file; it imports nothing of ours.

On standard input it is told of the processes to watch, each the leader of a group of its own: a line `+PID` as one has
started, `-PID` as one is gone. If the other side goes away, it asks those that are left to end, the last one first and
the others after it, waits, and kills their groups. Its argument is how many seconds each of these two may take.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

__all__ = ["main"]


def main(patience: float) -> None:
    """Watch until standard input is closed.

    Args:
        patience: Seconds between asking to end and killing.

    """
    # What ends the other side must not end this one first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: list[int] = []
    for line in sys.stdin:
        pid = int(line[1:])
        if line[0] == "+":
            watched.append(pid)
        else:
            watched.remove(pid)
    for stage in (watched[2:], watched[:2]):
        asked = [pid for pid in stage if _send(os.kill, pid, signal.SIGTERM)]
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and any(_send(os.kill, pid, 0) for pid in asked):
            time.sleep(0.05)
        # The groups also of those that are gone: what they started may still be there.
        for pid in stage:
            _send(os.killpg, pid, signal.SIGKILL)


def _send(how: Callable[[int, int], None], pid: int, number: int) -> bool:
    """Send a signal to a process or a group; say whether it is there."""
    try:
        how(pid, number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]))
