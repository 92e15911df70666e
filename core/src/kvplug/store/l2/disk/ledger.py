"""How much is in the directory, shared by all processes that use it, and the lock that goes with it.

The ledger is a small file: a header, then bytes and number of values of each area. An area is a shard, or, as the last
one, what is being written. An area may be *unknown*, until someone has counted it.

A process may be killed between any two instructions. So numbers go up before a file is made, and down after one was
removed: what is in the ledger may be too much, which the next count of the area corrects, but never too little. That
doesn't hold over a reboot, which may bring back an old ledger; so it carries the boot's id, and counts of another boot
are unknown.

Plain reads and writes, no shared mapping: touching a mapping of a file that was truncated, or for which the disk has no
room, kills the process.
"""

# Paths are plain strings: `stat` is called for each value.
# ruff: noqa: PTH102, PTH103, PTH112, PTH116, PTH120

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvplug.store.l2.disk.layout import MAX_SHARDS
from kvplug.store.l2.tier import TierError, TierTimeoutError

__all__ = ["Counts", "Ledger", "ledger_bytes"]

_HEADER = struct.Struct("<8sI52s")
_MAGIC = b"KVPLEDG1"
_UNKNOWN = -1
_NUMBER = np.dtype("<i8")
_ROW = struct.Struct("<qq")

# Waits for the lock: it is held for microseconds mostly, for milliseconds where a shard is read.
_FIRST_WAIT = 50e-6
_LONGEST_WAIT = 2e-3


def ledger_bytes(shards: int) -> int:
    """Return the bytes of the ledger of a directory with so many shards."""
    return _HEADER.size + (shards + 1) * _ROW.size


def _shards_in(data: bytes) -> int | None:
    """Return the number of shards that a ledger's header says, or None if it is no header."""
    if len(data) < _HEADER.size:
        return None
    magic, shards, _ = _HEADER.unpack_from(data)
    return int(shards) if magic == _MAGIC and 1 <= shards <= MAX_SHARDS else None


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:52]
    except OSError:
        # Without an id, every process that opens the ledger counts anew.
        return os.urandom(26).hex().encode()


class Counts:
    """The numbers, while the ledger is locked.

    Attributes:
        shards: Number of shards; also the number of the area of what is being written.
        used: Bytes over all areas. Unknown ones count as nothing.
        unknown: Areas that nobody has counted yet.

    """

    def __init__(self, descriptor: int, shards: int, table: NDArray[np.int64]) -> None:
        self.shards = shards
        self._descriptor = descriptor
        self._table = table
        nbytes = table[:, 0]
        self.unknown: set[int] = set((nbytes == _UNKNOWN).nonzero()[0].tolist())
        self.used = int(nbytes.sum()) - _UNKNOWN * len(self.unknown)

    @property
    def entries(self) -> int:
        """Number of values, in all areas that are known."""
        return int(np.maximum(self._table[: self.shards, 1], 0).sum())

    @property
    def occupied(self) -> NDArray[np.intp]:
        """Shards that hold values."""
        return np.flatnonzero(self._table[: self.shards, 1] > 0)

    def bytes_in(self, area: int) -> int:
        """Return the bytes of an area that is known."""
        return int(self._table[area, 0])

    def set(self, area: int, nbytes: int, entries: int) -> None:
        """Write down what was counted."""
        os.pwrite(self._descriptor, _ROW.pack(nbytes, entries), _HEADER.size + area * _ROW.size)
        self.used += nbytes - (0 if area in self.unknown else self.bytes_in(area))
        self.unknown.discard(area)
        self._table[area] = nbytes, entries

    def add(self, area: int, nbytes: int, entries: int) -> None:
        """Write down a change. An unknown area stays unknown: who counts it will see."""
        if area not in self.unknown:
            known, number = self._table[area].tolist()
            self.set(area, max(0, known + nbytes), max(0, number + entries))


class Ledger:
    """The ledger's file, and its lock.

    Args:
        path: The file.
        prepare: Makes the directories, and returns the number of shards. It is given the number that is in the ledger,
            if there is one. Called, with the ledger locked, whenever its file has been opened: again after a deletion
            from outside.

    """

    def __init__(self, path: str, prepare: Callable[[int | None], int]) -> None:
        self._path = path
        self._prepare = prepare
        self._mutex = threading.Lock()
        self._descriptor: int | None = None
        self._owner = 0
        self._device: int | None = None
        self._shards = 0
        self._boot = _boot_id()
        self._closed = False

    @contextmanager
    def locked(self, deadline: float) -> Iterator[Counts]:
        """Lock the ledger against all other threads and processes, and read it.

        Raises:
            TierTimeoutError: It was locked until the deadline (of `time.monotonic`).
            TierError: It is closed.
            OSError: It can't be read or made.

        """
        if not self._mutex.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._timeout()
        try:
            descriptor = self._lock(deadline)
            try:
                yield self._read(descriptor)
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def close(self) -> None:
        """Give the file back. Waits for whoever holds the lock."""
        with self._mutex:
            self._closed = True
            self._forget()

    def _timeout(self) -> TierTimeoutError:
        return TierTimeoutError(
            f"{self._path} was locked by another thread or process for too long: see whether the disk is slow, or a "
            "process that uses the directory is stopped."
        )

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, deadline: float) -> int:
        """Return the descriptor of the file that has the ledger's name, locked."""
        if self._closed:
            raise TierError(f"{self._path}: the tier is closed; open it again.")
        while True:
            # After a fork the descriptor's lock is the parent's, too.
            if self._descriptor is None or self._owner != os.getpid():
                self._open()
            descriptor = self._descriptor
            assert descriptor is not None
            self._flock(descriptor, deadline)
            try:
                named = os.stat(self._path)
                if os.path.samestat(named, os.fstat(descriptor)):
                    return descriptor
            except FileNotFoundError:
                pass
            # Somebody has deleted the file, and perhaps made another, which the others use.
            self._forget()

    def _open(self) -> None:
        self._forget()
        directory = os.path.dirname(self._path)
        if self._device is None:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        else:
            self._make_again(directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        self._descriptor, self._owner, self._shards = descriptor, os.getpid(), 0
        self._device = os.fstat(descriptor).st_dev

    def _make_again(self, directory: str) -> None:
        """Make a directory that is gone, but not where its file system isn't mounted any more."""
        root = os.path.dirname(directory)
        for path in (root, directory):
            if not os.path.isdir(path):
                if os.stat(os.path.dirname(path)).st_dev != self._device:
                    raise TierError(f"{path} is gone, and its file system with it: mount it again.")
                os.mkdir(path, 0o700)
            elif os.stat(path).st_dev != self._device:
                raise TierError(f"{path} is on another file system than before: mount the right one.")

    def _flock(self, descriptor: int, deadline: float) -> None:
        wait = _FIRST_WAIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            else:
                return
            if time.monotonic() >= deadline:
                raise self._timeout()
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _read(self, descriptor: int) -> Counts:
        if not self._shards:
            self._shards = self._prepare(_shards_in(os.pread(descriptor, _HEADER.size, 0)))
        data = os.pread(descriptor, ledger_bytes(self._shards) + 1, 0)
        if _shards_in(data) not in (None, self._shards):
            # Made again by another process, with another capacity, after all was deleted.
            self._shards = self._prepare(_shards_in(data))
            data = os.pread(descriptor, ledger_bytes(self._shards) + 1, 0)
        header = _HEADER.pack(_MAGIC, self._shards, self._boot)
        if len(data) != ledger_bytes(self._shards) or not data.startswith(header):
            # New, of another boot, or damaged: nothing is known.
            data = header + np.full((self._shards + 1, 2), _UNKNOWN, _NUMBER).tobytes()
            os.ftruncate(descriptor, 0)
            if os.pwrite(descriptor, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        table = np.frombuffer(data, _NUMBER, offset=_HEADER.size).reshape(-1, 2).copy()
        return Counts(descriptor, self._shards, table)
