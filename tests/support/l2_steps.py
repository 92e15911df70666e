"""Steps for `support.driver.drive` that concern the L2 tiers of the live engine; none of them generates anything."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplug.store.l2.value import HEADER_BYTES
from support import llm as engine
from support.valkey import command, until

__all__ = ["Gauges", "Held", "Killed", "Meet", "SwapValues", "dont_check", "drain", "fill_disk", "forget", "recovered"]


def drain(llm: Any) -> None:
    """Wait until nothing is on its way to L2 or from there."""
    for client in engine.connector(llm).worker.store.clients:
        assert client._calls.drain(time.monotonic() + 30), "calls don't end"


def forget(llm: Any) -> None:
    """Empty vLLM's own cache and L1: the next hit is L2's."""
    drain(llm)
    engine.reset_local_cache(llm)
    engine.connector(llm).worker.store.memory.allocator.clear()


def recovered(llm: Any) -> None:
    """Wait until the tier is used again, if it is left alone."""
    drain(llm)
    until(engine.connector(llm).worker.store.clients[0].health.works, 60)


def dont_check(llm: Any) -> None:
    """Take blocks from L2 without checking them."""
    engine.connector(llm).worker.store.clients[0].blocks.accept = lambda *_: None


class Gauges:
    """A step that notes what the store's gauges say."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def __call__(self, llm: Any) -> None:
        """Note them."""
        self.seen.append(engine.connector(llm).worker.store.gauges())


class Held:
    """A step that notes how many descriptors and threads the process has when nothing is on its way."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, llm: Any) -> None:
        """Note them."""
        drain(llm)
        self.seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))  # noqa: PTH208


@dataclass
class Meet:
    """A step that waits, when nothing is on its way to L2, until another engine has come as far.

    Attributes:
        own: A file to make.
        other: The file that the other engine makes.

    """

    own: Path
    other: Path

    def __call__(self, llm: Any) -> None:
        """Say that this engine is there, and wait for the other one."""
        drain(llm)
        self.own.touch()
        until(self.other.exists, 120)


def fill_disk() -> Callable[[], None]:
    """Let writes of values fail from now on as on a full file system; return what makes room again."""
    pwrite = os.pwrite

    def fail(descriptor: int, data: Any, *rest: Any) -> int:
        if len(data) > 1000:  # a value; the ledger's few bytes fit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, *rest)

    os.pwrite = fail

    def make_room() -> None:
        os.pwrite = pwrite

    return make_room


@dataclass(frozen=True)
class Killed:
    """A step that writes down what of /dev/shm the process has mapped or open, and kills it.

    Attributes:
        note: File to write the names to, one a line.
    """

    note: str

    def __call__(self, llm: Any) -> None:
        """Write, and end."""
        names = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        names |= {str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
        Path(self.note).write_text("\n".join(sorted(name for name in names if name.startswith("/dev/shm/"))))
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class SwapValues:
    """A step that gives each key in a Valkey the next key's value, with the halves of the block exchanged.

    Attributes:
        port: Where it listens.
    """

    port: int

    def __call__(self, llm: Any) -> None:
        """Exchange them."""
        listed = command(self.port, "KEYS", "*")
        assert isinstance(listed, list)
        assert len(listed) > 1, "nothing to exchange"
        names = [name for name in listed if isinstance(name, bytes)]
        values = [command(self.port, "GET", name) for name in names]
        for name, value in zip(names, values[1:] + values[:1], strict=True):
            assert isinstance(value, bytes)
            half = HEADER_BYTES + (len(value) - HEADER_BYTES) // 2
            command(self.port, "SET", name, value[:HEADER_BYTES] + value[half:] + value[HEADER_BYTES:half])
