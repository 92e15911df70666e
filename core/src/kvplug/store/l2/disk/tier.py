"""The disk tier itself: what `Tier` asks for, and what the file system's errors mean."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

from kvplug.log import RateLimited, get_logger
from kvplug.settings import Settings
from kvplug.store.l2.disk.reading import Reader, mark, size_of
from kvplug.store.l2.disk.settings import DiskSettings
from kvplug.store.l2.disk.space import Space
from kvplug.store.l2.disk.writing import Writer
from kvplug.store.l2.tier import Tier, TierError, TierTimeoutError, Usage

__all__ = ["DiskTier"]

logger = get_logger(__name__)
_limited = RateLimited(logger)

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
        """Make the directory if it isn't there, count what is in it if nobody has yet, and see to the cap."""
        deadline = time.monotonic() + timeout
        self.close()
        space = Space(self._root, self._capacity, max_value_bytes)
        try:
            with self._errors("be opened"):
                counted = space.count(deadline)
                self._check_size(space, max_value_bytes)
                if counted:
                    space.shrink(deadline)
                    self._compare_with_disk(space, deadline)
                if self._direct:
                    self._try_direct(space.layout.ledger)
        except BaseException:
            space.ledger.close()
            raise
        self._space = space

    def _check_size(self, space: Space, value_bytes: int) -> None:
        if not space.holds(value_bytes):
            raise TierError(
                f"disk_size is {self._capacity} bytes, in which no block of {value_bytes} bytes fits: set a larger one."
            )

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
                "disk_size is %d bytes, but the file system of %s has room for %d only; when it is full, some blocks "
                "can't be stored. Set a smaller disk_size, or make room.",
                self._capacity,
                self._root,
                there,
            )

    def exists(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        """Say which keys are there. Each costs a look into the file system."""
        layout, deadline = self._opened().layout, time.monotonic() + timeout
        found = [False] * len(keys)
        with self._errors("be read"):
            for index, key in enumerate(keys):
                found[index] = size_of(layout.value(key)) is not None
                self._check(deadline)
        return found

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], timeout: float) -> list[int | None]:
        """Read values straight into the buffers."""
        space, deadline = self._opened(), time.monotonic() + timeout
        paths = [space.layout.value(key) for key in keys]
        with self._errors("be read"), Reader(paths, buffers, direct=self._direct) as reader:
            lengths: list[int | None] = []
            for index in range(len(paths)):
                if lengths:
                    self._check(deadline)
                lengths.append(self._read(reader, keys, index, deadline))
            return lengths

    def _read(self, reader: Reader, keys: Sequence[bytes], index: int, deadline: float) -> int | None:
        try:
            return reader.read(index)
        except OSError as error:
            if error.errno == errno.EIO:
                # It may never be readable again, and would stand in the way of a good one.
                with suppress(OSError, TierError):
                    self._opened().remove([keys[index]], deadline)
            raise

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], timeout: float) -> list[bool]:
        """Write values that aren't there. What was used longest ago makes room for them."""
        space, deadline = self._opened(), time.monotonic() + timeout
        kept = [False] * len(keys)
        with self._errors("be written to"):
            new = []
            for index, (key, value) in enumerate(zip(keys, values, strict=True)):
                kept[index] = self._touch(space.layout.value(key), len(value))
                if not kept[index]:
                    new.append(index)
            writer = Writer(space, direct=self._direct, check=self._check)
            written, full = writer.write([(keys[index], values[index]) for index in new], deadline)
        for index, there in zip(new, written, strict=True):
            kept[index] = there
        if full:
            _limited.warning(
                self._root, "The file system of %s is full. Make room, or set a smaller disk_size.", self._root
            )
        return kept

    def _touch(self, path: str, size: int) -> bool:
        """Say whether a value is there, and mark it as used. Equal keys have equal contents, unless a file was cut."""
        if size_of(path) != size:
            return False
        mark(path)
        return True

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
