"""How values are read: straight into the buffers, one after another, and ahead where they come from the disk."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplug.store.l2.disk import files

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["IDLE_NS", "LONGEST_READ", "MISSES", "Reader", "mark", "size_of"]

#: What isn't a regular file (somebody else's link, directory, pipe) is not followed, not waited for, and a miss.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
MISSES = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ESTALE)

#: A value that was used is marked so if its last mark is older, in nanoseconds: a mark writes to the disk.
_MARK_NS = 1_000_000_000

#: Seconds after which a file that was opened may be another value's.
LONGEST_READ = 5.0

#: A file that nobody has begun to read for so long isn't being read: whoever takes so long doesn't use what it read.
IDLE_NS = int(2 * LONGEST_READ * 1e9)

#: Files that the kernel is asked to read ahead of the one that is waited for, and their bytes.
_AHEAD = 8
_AHEAD_BYTES = 16 << 20


def size_of(path: str) -> int | None:
    """Return the length of a value's file, or None if there is none."""
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno in MISSES:
            return None
        raise
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def mark(file: str | int) -> None:
    """Mark a value as used now, by its path or its descriptor: its file's time says how long it wasn't."""
    now = time.time_ns()
    with suppress(OSError):  # gone just now, another user's, or read-only: it can be read all the same
        os.utime(file, ns=(now, now))


@dataclass(frozen=True)
class _File:
    """A value's file. Its descriptor is negative where there is none, or it doesn't fit."""

    descriptor: int = -1
    size: int = 0
    opened: float = 0.0


class Reader:
    """Reads files into buffers, in order. Use it as a context manager.

    Where a file isn't in the page cache, the next ones are opened and asked for before it is waited for: a disk is fast
    only if it has several things to do. Where files are in the page cache, that would only cost time.

    Args:
        paths: The files.
        buffers: For each one, where to.
        direct: Whether to read past the page cache where a buffer is aligned.

    """

    def __init__(self, paths: Sequence[str], buffers: Sequence[memoryview], *, direct: bool) -> None:
        self._paths = paths
        self._buffers = buffers
        self._direct = direct
        self._opened: deque[_File] = deque()
        self._cold = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._opened:
            if file.descriptor >= 0:
                os.close(file.descriptor)
        self._opened.clear()

    def read(self, index: int) -> int | None:
        """Read a file, the next one after the last that was read; return its length, or None if it isn't there."""
        if not self._opened:
            self._opened.append(self._open(index))
        file = self._opened[0]
        try:
            if file.descriptor < 0:
                return None
            length = self._read(file, index)
            return length if time.monotonic() - file.opened < LONGEST_READ else None
        finally:
            self._opened.popleft()
            if file.descriptor >= 0:
                os.close(file.descriptor)

    def _is_direct(self, index: int) -> bool:
        return self._direct and files.is_aligned(self._buffers[index])

    def _open(self, index: int) -> _File:
        flags = _OPEN | os.O_DIRECT if self._is_direct(index) else _OPEN
        try:
            descriptor = os.open(self._paths[index], flags)
        except OSError as error:
            if error.errno in MISSES:
                return _File()
            raise
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size <= len(self._buffers[index]):
                # Before it is read: so nobody takes it for one that can be written over.
                opened = time.monotonic()
                if not 0 <= time.time_ns() - status.st_mtime_ns < _MARK_NS:
                    mark(descriptor)
                return _File(descriptor, status.st_size, opened)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return _File()

    def _read(self, file: _File, index: int) -> int:
        buffer = self._buffers[index][: file.size]
        if self._is_direct(index):
            return files.read_direct(file.descriptor, buffer)
        done = 0
        if not self._cold:
            done = files.read_cached(file.descriptor, buffer)
            if done < file.size:
                self._cold = True
                _ask_for(file)
        if self._cold:
            self._look_ahead(index)
        return files.read_buffered(file.descriptor, buffer, done)

    def _look_ahead(self, index: int) -> None:
        nbytes = sum(file.size for file in self._opened)
        while len(self._opened) <= _AHEAD and nbytes < _AHEAD_BYTES and index + len(self._opened) < len(self._paths):
            file = self._open(index + len(self._opened))
            self._opened.append(file)
            if file.descriptor >= 0:
                _ask_for(file)
                nbytes += file.size


def _ask_for(file: _File) -> None:
    with suppress(OSError):  # a file system that takes no advice
        os.posix_fadvise(file.descriptor, 0, file.size, os.POSIX_FADV_WILLNEED)
