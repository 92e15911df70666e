"""Stop a server in the middle of what it does, and let it go on."""

import os
import signal


def pause(pid: int) -> None:
    """Stop a child process (SIGSTOP), and return once all of its threads stand still.

    The signal alone isn't enough: a server of many threads may still answer a request that comes right after it.

    Args:
        pid: A child of this process.

    Raises:
        AssertionError: It has ended.

    """
    os.kill(pid, signal.SIGSTOP)
    # Ends are asked for, too: one that has ended never stops.
    state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert state is not None
    assert state.si_code == os.CLD_STOPPED, f"process {pid} has ended"


def resume(pid: int) -> None:
    """Let a child process that was paused go on (SIGCONT)."""
    os.kill(pid, signal.SIGCONT)
