"""Runs test functions in forked processes that have vLLM imported already: see `run`."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from support.jobs import Answer, Job
from support.overlays import overlay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

#: The tests' root folder: `support` is importable from there.
TESTS = Path(__file__).resolve().parents[1]

#: vLLM's two model runners.
RUNNERS = ("v1", "v2")

#: Lines of a failed job's output that its error shows.
_SHOWN_LINES = 80

#: Seconds to import vLLM, on a busy machine with a cold disk.
_START_TIMEOUT = 600

#: Variables of the caller that would change what engines do. (Importing vLLM sets LD_PRELOAD.)
_SETTINGS = re.compile(r"(VLLM|KVPLUG|AIBRIX|OMP|TORCH|TORCHDYNAMO|TRITON|HF|TRANSFORMERS)_|PYTHONPATH$|LD_PRELOAD$")

# By model runner and release.
_zygotes: dict[tuple[str, str | None], _Zygote] = {}


class JobError(AssertionError):
    """A job raised, was killed or died. The message has its traceback and the end of its output."""


def base_environment(runner: str) -> dict[str, str]:
    """Return the environment of test engines: one thread, no network, nothing from the caller's own settings.

    Args:
        runner: Which of vLLM's model runners to use, ``v1`` or ``v2`` (see `support.v2cpu`).
    """
    if runner not in RUNNERS:
        raise ValueError(f"runner is one of {', '.join(RUNNERS)}, not {runner!r}")
    environment = {name: value for name, value in os.environ.items() if not _SETTINGS.match(name)}
    if runner == "v2":  # reaches processes that vLLM spawns, too
        environment |= {"PYTHONPATH": str(TESTS / "support" / "v2cpu"), "TESTS_V2CPU": "1"}
    return environment | {
        "OMP_NUM_THREADS": "1",  # sums are split over threads, so results depend on their number
        "TORCHDYNAMO_DISABLE": "1",  # else log-probabilities are compiled, for 11 to 40 s
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(TESTS.parent / "build" / "vllm-cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else servers take one thread per core, whatever is said above
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
    }


def run(
    function: Callable[..., T],
    *,
    runner: str = "v1",
    release: str | None = None,
    timeout: float = 300.0,
    env: Mapping[str, str | None] | None = None,
    **kwargs: Any,
) -> T:
    """Run a function in a fresh fork of a process that has vLLM imported, and return its result.

    The first call for a runner starts that process, which takes 10 to 20 seconds. vLLM's plugins are not loaded and
    no model runner is imported when the function starts. Engines that it makes run in its own process.

    Args:
        function: A module-level function of a test module or of `support`. Its module is imported in the fork.
        runner: vLLM's model runner, ``v1`` or ``v2``. Check with `support.llm.runner_kind` that it's really used.
        release: Another vLLM than the installed one (see `support.overlays`).
        timeout: Seconds until the fork and its children are killed.
        env: Changes of the environment: values to set, or None for variables to remove.
        **kwargs: The function's arguments; they, and its result, must be picklable.

    Raises:
        JobError: the function raised, ended its process, or took too long.
    """
    if function.__qualname__ != function.__name__ or function.__name__ == "<lambda>":
        raise ValueError(f"{function.__qualname__} is not a module-level function, so a fork can't import it")
    file = sys.modules[function.__module__].__file__
    if file is None:
        raise ValueError(f"{function.__module__} has no file, so a fork can't import it")
    zygote = _zygotes.get((runner, release))
    if zygote is None:
        zygote = _zygotes[runner, release] = _Zygote(runner, release)
    with tempfile.TemporaryDirectory(prefix="kvplug-job-") as folder:
        log = Path(folder) / "log"
        job = Job(
            module=function.__module__,
            file=file,
            function=function.__name__,
            kwargs=pickle.dumps(kwargs),
            env=dict(env or {}),
            timeout=timeout,
            log=str(log),
        )
        try:
            answer = zygote.do(job)
        except BaseException:  # an interrupt, too, leaves an answer in the connection that is nobody's
            zygote.stop()
            del _zygotes[runner, release]
            raise
        if answer.result is None:
            output = log.read_text(errors="replace").splitlines() if log.exists() else []
            tail = "\n".join(output[-_SHOWN_LINES:])
            raise JobError(f"{function.__name__} on {runner}: {answer.problem}\n--- its output ends with\n{tail}")
    result: T = pickle.loads(answer.result)
    return result


def stop_all() -> None:
    """End the processes that `run` started. Later calls start new ones."""
    while _zygotes:
        _zygotes.popitem()[1].stop()


def stop_release(release: str) -> None:
    """End the processes that `run` started for a release that isn't the installed one."""
    for key in [key for key in _zygotes if key[1] == release]:
        _zygotes.pop(key).stop()


atexit.register(stop_all)


class _Zygote:
    """The test process's handle on one zygote process."""

    def __init__(self, runner: str, release: str | None) -> None:
        environment = base_environment(runner) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if release is not None:
            path = [str(overlay(release)), environment.get("PYTHONPATH")]
            environment |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "TESTS_VLLM_RELEASE": release}
        ours, theirs = socket.socketpair()
        command = (
            "import sys; sys.path.insert(0, sys.argv[1]); from support import zygote; zygote.main(int(sys.argv[2]))"
        )
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - closed by stop
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", command, str(TESTS), str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is pytest's; the zygote ends when the connection closes
            )
        self._connection = Connection(ours.detach())
        try:
            self._receive(_START_TIMEOUT)
        except BaseException:
            self.stop()
            raise

    def do(self, job: Job) -> Answer:
        self._connection.send(job)
        answer = self._receive(job.timeout + 30)
        if not isinstance(answer, Answer):
            raise JobError(f"the zygote answered {answer!r}")
        return answer

    def _receive(self, timeout: float) -> Any:
        problem = f"said nothing for {timeout:.0f} s"
        try:
            if self._connection.poll(timeout):
                return self._connection.recv()
        except (EOFError, ConnectionResetError):
            problem = "has died"
        self._log.seek(0)
        tail = "\n".join(self._log.read().splitlines()[-_SHOWN_LINES:])
        raise JobError(f"the process that imports vLLM for tests {problem}\n--- its output ends with\n{tail}")

    def stop(self) -> None:
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()
