"""Fresh processes that measurements run in, one engine each."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from typing_extensions import Self

__all__ = ["ROOT", "Child", "ChildError", "in_child", "set_environment"]

T = TypeVar("T")

#: The repository.
ROOT = Path(__file__).resolve().parents[2]

_SHOWN_LINES = 30


class ChildError(Exception):
    """A measurement failed. The message has its traceback, or the end of its output."""


def set_environment() -> None:
    """Give this process, and its children, the environment of test engines, and let them import what tests share."""
    sys.path.append(str(ROOT / "tests"))
    from support.engines import base_environment

    environment = base_environment("v1") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.clear()
    os.environ.update(environment)


class Child:
    """A fresh process that calls functions when it is told to, and keeps what they leave behind.

    Use it as a context manager.

    Args:
        name: Names the file that takes its output.

    """

    def __init__(self, name: str) -> None:
        folder = ROOT / "build" / "bench"
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{name}.log"
        self._log.unlink(missing_ok=True)
        # Spawned: nothing of this process is in it, and nothing of another measurement's.
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(self._log)), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a module-level function in the child, and return its result.

        Raises:
            ChildError: It raised, or the child ended.

        """
        self._connection.send((function, arguments, options))
        try:
            result, problem = self._connection.recv()
        except EOFError:
            problem = "the process ended"
        if problem is not None:
            output = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
            raise ChildError("\n".join([problem, f"--- {self._log} ends with", *output[-_SHOWN_LINES:]]))
        value: T = result
        return value


def in_child(function: Callable[..., T], *arguments: Any) -> T:
    """Call a module-level function in a process of its own, and return its result."""
    with Child(function.__module__.rpartition(".")[2]) as child:
        return child.call(function, *arguments)


def _serve(connection: Connection, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    while True:
        try:
            function, arguments, options = connection.recv()
        except EOFError:
            break
        except Exception:  # noqa: BLE001 - a function's module may fail to be imported
            connection.send((None, traceback.format_exc()))
            continue
        try:
            connection.send((function(*arguments, **options), None))
        except Exception:  # noqa: BLE001 - whatever it was, the parent has to know
            connection.send((None, traceback.format_exc()))
