"""The disk tier itself: what `Tier` asks for, and what the file system's errors mean."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

from kvplug.log import RateLimited, get_logger
from kvplug.settings import Settings
from kvplug.store.l2.disk import files
from kvplug.store.l2.disk.settings import DiskSettings
from kvplug.store.l2.disk.space import NO_ROOM, Space, Temporary
from kvplug.store.l2.tier import Tier, TierError, TierTimeoutError, Usage

__all__ = ["DiskTier"]

logger = get_logger(__name__)
_limited = RateLimited(logger)

#: A value that was used is marked so if its last mark is older, in nanoseconds: a mark writes to the disk.
_MARK_NS = 1_000_000_000

#: What isn't a regular file (somebody else's link, directory, pipe) is not followed, not waited for, and a miss.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MISSES = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ESTALE)

_REMEDIES = {
    errno.EACCES: "make it writable for this process, or set disk_path to another directory",
    errno.EPERM: "make it writable for this process, or set disk_path to another directory",
    errno.EROFS: "mount it for writing, or set disk_path to another directory",
    errno.ENOENT: "make the directory, or set disk_path to another one",
    errno.ENOTDIR: "set disk_path to a directory",
    errno.EEXIST: "set disk_path to a directory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.ENOSPC: "make room on its file system",
    errno.EDQUOT: "raise the quota",
}


class DiskTier(Tier):
    """Keeps values in files; see the package for how.

    Args:
        settings: Where, how much, and whether past the page cache.

    """

    name = "disk"
    Settings: ClassVar[type[Settings] | None] = DiskSettings

    def __init__(self, settings: DiskSettings) -> None:
        self._root = str(settings.disk_path)
        self._capacity = int(settings.disk_size)
        self._direct = settings.disk_direct
        self._space: Space | None = None

    @property
    def place(self) -> str:
        """The directory."""
        return self._root

    def open(self, *, max_value_bytes: int, timeout: float) -> None:
        """Make the directory if it isn't there, count what is in it if the machine was restarted, and see to the cap."""
        deadline = time.monotonic() + timeout
        self.close()
        space = Space(self._root, self._capacity, max_value_bytes)
        try:
            with self._errors("be opened"):
                counted = space.count(deadline)
                if not space.holds(max_value_bytes):
                    raise TierError(
                        f"disk_size is {self._capacity} bytes, in which no block of {max_value_bytes} bytes fits: set a "
                        "larger one."
                    )
                if counted:
                    space.shrink(deadline)
                    self._compare_with_disk(space, deadline)
                if self._direct:
                    self._try_direct(space.layout.ledger)
        except BaseException:
            space.ledger.close()
            raise
        self._space = space

    def _try_direct(self, path: str) -> None:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise TierError(
                f"The file system of {self._root} has no direct I/O: set disk_direct to false, or disk_path to a "
                "directory on another one."
            ) from error

    def _compare_with_disk(self, space: Space, deadline: float) -> None:
        with space.ledger.locked(deadline) as counts:
            used = space.used(counts)
        disk = os.statvfs(self._root)
        there = disk.f_bavail * disk.f_frsize + used
        if there < self._capacity:
            logger.warning(
                "disk_size is %d bytes, but %s has only %d left: when they are used, blocks make room for others, and some "
                "can't be stored. Set a smaller disk_size, or make room.",
                self._capacity,
                self._root,
                there,
            )

    def exists(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        """Say which keys are there, up to the first that is missing: each costs a look into the file system."""
        space, deadline = self._opened(), time.monotonic() + timeout
        found = [False] * len(keys)
        with self._errors("be read"):
            for index, key in enumerate(keys):
                if _size(space.layout.value(key)) is None:
                    break
                found[index] = True
                self._check(deadline)
        return found

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], timeout: float) -> list[int | None]:
        """Read values straight into the buffers."""
        deadline = time.monotonic() + timeout
        lengths: list[int | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            if lengths:
                self._check(deadline)
            lengths.append(self._read(key, buffer, deadline))
        return lengths

    def _read(self, key: bytes, buffer: memoryview, deadline: float) -> int | None:
        path = self._opened().layout.value(key)
        direct = self._direct and files.is_aligned(buffer)
        with self._errors("be read"):
            try:
                descriptor = os.open(path, _OPEN | os.O_DIRECT if direct else _OPEN)
            except OSError as error:
                if error.errno in _MISSES:
                    return None
                raise
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_size > len(buffer):
                    return None
                read = files.read_direct if direct else files.read_buffered
                length = read(descriptor, buffer, status.st_size)
                _mark(descriptor, status.st_mtime_ns)
            except OSError as error:
                if error.errno == errno.EIO:
                    # It may never be readable again, and would stand in the way of a good one.
                    with suppress(OSError, TierError):
                        self._opened().remove([key], deadline)
                raise
            finally:
                os.close(descriptor)
            return length

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], timeout: float) -> list[bool]:
        """Write values that aren't there. What was used longest ago makes room for them."""
        deadline = time.monotonic() + timeout
        with self._errors("be written to"):
            kept = []
            for key, value in zip(keys, values, strict=True):
                self._check(deadline)
                kept.append(self._write(key, value, deadline))
        return kept

    def _write(self, key: bytes, value: memoryview, deadline: float) -> bool:
        space = self._opened()
        path = space.layout.value(key)
        # Equal keys have equal contents. A file of another length was damaged.
        if _size(path) == len(value):
            with suppress(OSError):  # gone just now, or not ours
                os.utime(path, follow_symlinks=False)
            return True
        try:
            return self._write_new(space, key, value, deadline)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        # The file system is full before the cap is reached. What is there already may make room as well.
        with suppress(OSError):
            if space.free(len(value), deadline) and self._write_new(space, key, value, deadline):
                return True
        _limited.warning(self._root, "The file system of %s is full: some blocks aren't stored. Make room.", self._root)
        return False

    def _write_new(self, space: Space, key: bytes, value: memoryview, deadline: float) -> bool:
        temporary = space.reserve(len(value), deadline)
        if temporary is None:
            return False
        published = False
        try:
            self._fill(temporary, value)
            self._check(deadline)
            published = space.publish(temporary, key, deadline)
        finally:
            if not published:
                space.abandon(temporary)
            # Only now: the lock that says that the writer is alive ends with it.
            os.close(temporary.descriptor)
        return published

    def _fill(self, temporary: Temporary, value: memoryview) -> None:
        if not (self._direct and files.is_aligned(value)):
            files.write_buffered(temporary.descriptor, value)
            return
        flags = fcntl.fcntl(temporary.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(temporary.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        files.write_direct(temporary.descriptor, value)

    def delete(self, keys: Sequence[bytes], timeout: float) -> None:
        """Remove values."""
        with self._errors("be written to"):
            if keys:
                self._opened().remove(keys, time.monotonic() + timeout)

    def usage(self, timeout: float) -> Usage:
        """Return what is in the directory, of all engines that share it; None while it is being counted."""
        space = self._opened()
        with self._errors("be read"), space.ledger.locked(time.monotonic() + timeout) as counts:
            if counts.unknown:
                return Usage(capacity_bytes=self._capacity)
            return Usage(space.used(counts), self._capacity, counts.entries)

    def close(self) -> None:
        """Give the ledger's descriptor back. Files under way are written, or removed."""
        space, self._space = self._space, None
        if space is not None:
            space.ledger.close()

    def _opened(self) -> Space:
        space = self._space
        if space is None:
            raise TierError(f"{self._root}: the tier isn't open; open it first.")
        return space

    def _check(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TierTimeoutError(
                f"{self._root} didn't take or give all blocks in time: see whether the disk is slow."
            )

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn the file system's errors into sentences."""
        try:
            yield
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "check the disk and its file system")
            raise TierError(f"{self._root} can't {what} ({error.strerror or error}): {remedy}.") from error


def _size(path: str) -> int | None:
    """Return the length of a value's file, or None if there is none."""
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno in _MISSES:
            return None
        raise
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _mark(descriptor: int, marked_ns: int) -> None:
    """Mark a file as used now."""
    now = time.time_ns()
    if not 0 <= now - marked_ns < _MARK_NS:
        with suppress(OSError):  # another user's, or read-only: it can be read all the same
            os.utime(descriptor, ns=(now, now))
