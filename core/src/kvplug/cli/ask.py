"""Ask what only vLLM or a connector can tell, without importing either: a subprocess does (`kvplug.cli.probe`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

__all__ = ["MARK", "TIMEOUT", "Answer", "ask"]

#: Beginning of a line that is part of an answer.
MARK = "kvplug-probe: "

#: Seconds that vLLM may take, which on a busy machine are minutes.
TIMEOUT = 300.0

# What Python runs; the request follows.
_PROBE = ("-m", "kvplug.cli.probe")

# Lines of the subprocess's log that an error quotes.
_TAIL = 5


@dataclass
class Answer:
    """What the probe said; a part that it didn't come to is missing."""

    #: By part: `vllm`, `autoload`, `runners`, `files`, `patches`, `model`, `config`.
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: By entry-point value: `error` (None if it can be loaded, else a sentence) and `hooks`.
    connectors: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: By entry-point value, for those that have settings: `error` or `values` ({setting: [value, source]}).
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Why the probe came to no end, if so.
    error: str | None = None


def ask(
    *parts: str, model: str | None = None, config: Mapping[str, Any] | None = None, timeout: float = TIMEOUT
) -> Answer:
    """Run the probe.

    A connector whose import crashes the process or hangs is noted as broken, and the probe is run again without it.

    Args:
        parts: What to ask for, in this order (see `kvplug.cli.probe.main`).
        model: For the part `model`: name or path of a model.
        config: For the part `config`: the value of `--kv-transfer-config`.
        timeout: Seconds that one run may take.

    """
    answer = Answer()
    skip: list[str] = []
    todo = list(parts)
    while True:
        request = {"parts": todo, "model": model, "config": config, "skip": skip}
        lines, end = _run(json.dumps(request), timeout)
        doing: dict[str, Any] = {}
        for line in lines:
            doing = line if line["part"] == "doing" else doing
            _take(answer, line)
        if end is None:
            return answer
        broken = doing.get("connector")
        if broken is None or broken in skip:
            answer.error = f"Asking vLLM ({doing.get('what', 'starting Python')}) {end}"
            return answer
        skip.append(broken)
        answer.connectors[broken] = {"error": f"Importing connector {broken} {end}", "hooks": None}
        todo = [part for part in todo if part not in answer.parts]


def _take(answer: Answer, line: dict[str, Any]) -> None:
    part = line.pop("part")
    if part in ("connector", "settings"):
        (answer.connectors if part == "connector" else answer.settings)[line.pop("value")] = line
    elif part != "doing":
        answer.parts[part] = line


def _run(request: str, timeout: float) -> tuple[list[dict[str, Any]], str | None]:
    """Run the probe once.

    Returns:
        The lines it answered, and None or how it ended before it was done.

    """
    # Like the `vllm` command, and unlike `python -m`, without the current folder on the path.
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, *_PROBE, request],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environ,
            start_new_session=True,
        )
        end = None
        try:
            with _terminated_like_interrupted():
                output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end = f"took longer than {timeout:g} s."
            output = ""
        finally:
            # The whole group: vLLM inspects models in subprocesses of its own.
            _kill(process.pid)
        if end is not None:
            output, _ = process.communicate()
        elif process.returncode != 0:
            end = f"ended with {_status(process.returncode)}: {_tail(log)}"
    return list(_lines(output)), end


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl-C does, so that no probe is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _tail(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return " / ".join(lines[-_TAIL:]) or "it said nothing."


def _lines(output: str) -> Iterator[dict[str, Any]]:
    """Yield the answer's lines; anything else on standard output is somebody's noise."""
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            # A line that isn't whole was being written when the process ended.
            with contextlib.suppress(ValueError):
                yield json.loads(text)
