"""How values become files: room is set aside, they are written under other names, and get their own when whole.

Files are made and renamed with the ledger locked, for several values at once; their bytes are written without.
"""

# Paths are plain strings: these are called for each value.
# ruff: noqa: PTH103, PTH104, PTH108, PTH120

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from kvplug.store.l2.disk import files
from kvplug.store.l2.disk.layout import Value, charge, charge_of, reserved
from kvplug.store.l2.disk.ledger import Counts
from kvplug.store.l2.disk.reading import IDLE_NS, mark
from kvplug.store.l2.disk.space import Space, pause

__all__ = ["Writer"]

#: What the file system says when it is full, or its user's share of it.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

#: Values that are written together: so many, of so many bytes together, and of such a share of the cap.
_TOGETHER = 16
_TOGETHER_BYTES = 32 << 20
_TOGETHER_SHARE = 8

Item = tuple[bytes, memoryview]


@dataclass(frozen=True)
class _Temporary:
    """A file that is being written.

    Its writer has a lock on it for as long as the descriptor is open. The kernel ends the lock with the process,
    however that ends, which is how a dead writer's file is told from a slow one's.
    """

    path: str
    descriptor: int
    charge: int
    reused: bool = False


@dataclass
class _Group:
    """Values that are written together.

    Attributes:
        items: Keys and values.
        temporaries: Their files, for as many of the first as there was room for.
        written: How many of these are whole.
        full: Whether the file system was full.

    """

    items: Sequence[Item]
    temporaries: list[_Temporary] = field(default_factory=list)
    written: int = 0
    full: bool = False


@dataclass
class _Reuse:
    """Files of evicted values, to be written over.

    Removing a file and making another can take many times as long as writing a block over it: blocks are discarded, and
    where thousands of files were removed a short time ago, ext4 looks at each of them for one to use. So if a value was
    evicted whose length is right, its file is taken, unless somebody may still be reading it.

    Attributes:
        writer: Makes temporary files of them.
        size: Bytes of the values to be written.
        most: How many files can be used.
        files: What was taken.

    """

    writer: Writer
    size: int
    most: int
    files: list[_Temporary] = field(default_factory=list)

    def take(self, counts: Counts, value: Value, shard: int) -> bool:
        """Take a file over, if it is of use."""
        idle = time.time_ns() - value.used_ns
        if value.size != self.size or idle < IDLE_NS or len(self.files) >= self.most:
            return False
        self.files.append(self.writer.take_over(counts, value, shard))
        return True


class Writer:
    """Writes values into a directory.

    Args:
        space: Its room.
        direct: Whether to write aligned values past the page cache.
        check: Called after each value, with the deadline; raises when it has passed.

    """

    def __init__(self, space: Space, *, direct: bool, check: Callable[[float], None]) -> None:
        self._space = space
        self._direct = direct
        self._check = check

    def write(self, items: Sequence[Item], deadline: float) -> tuple[list[bool], bool]:
        """Write values.

        Args:
            items: Keys and values.
            deadline: Of `time.monotonic`.

        Returns:
            For each value whether it is there now, and whether the file system was full.

        Raises:
            TierTimeoutError: The deadline has passed.
            OSError: Something can't be written, for another reason than that there is no room.

        """
        kept: list[bool] = []
        full = False
        while len(kept) < len(items):
            rest = items[len(kept) :]
            group = self._write_group(rest, deadline)
            if group.full and not group.written:
                # The file system is full before the cap is reached. What is there already may make room as well.
                full = True
                wanted = sum(reserved(len(value)) for _, value in group.items)
                if self._space.free(wanted, deadline):
                    group = self._write_group(rest, deadline)
            kept += self._publish(group, deadline) or [False]
        return kept, full

    def _write_group(self, items: Sequence[Item], deadline: float) -> _Group:
        """Set room aside for the first few values, and write them."""
        group = _Group(self._first(items))

        try:
            self._reserve(group, deadline)
            for (_, value), temporary in zip(group.items, group.temporaries, strict=False):
                files.fill(temporary.descriptor, value, direct=self._direct, over=temporary.reused)
                group.written += 1
                self._check(deadline)
        except OSError as error:
            self._abandon(group.temporaries[group.written :])
            if error.errno in _NO_ROOM:
                group.full = True
                return group
            self._abandon(group.temporaries[: group.written])
            raise
        except BaseException:
            self._abandon(group.temporaries)
            raise
        return group

    def _first(self, items: Sequence[Item]) -> Sequence[Item]:
        most = min(_TOGETHER_BYTES, self._space.limit // _TOGETHER_SHARE)
        number = nbytes = 0
        for _, value in items[:_TOGETHER]:
            nbytes += reserved(len(value))
            if number and nbytes > most:
                break
            number += 1
        return items[:number]

    def _reserve(self, group: _Group, deadline: float) -> None:
        """Set room aside, for as many of a group's first values as possible.

        For none where it takes long to count, or to make room: others need the ledger too, and later calls go on.
        """
        space = self._space
        reuse = _Reuse(self, 0, 0)
        with ExitStack() as at_end, space.ledger.locked(deadline) as counts:
            at_end.callback(lambda: self._abandon(reuse.files))
            space.patrol(counts)
            until = pause(deadline)
            if not space.count_unknown(counts, until):
                return
            for index, (_, value) in enumerate(group.items):
                if not reuse.files or reuse.size != len(value):
                    self._abandon(reuse.files)
                    reuse.files, reuse.size, reuse.most = [], len(value), len(group.items) - index
                    if not space.make_room(counts, reserved(len(value)), until, reuse):
                        return
                if reuse.files:
                    group.temporaries.append(reuse.files.pop())
                else:
                    group.temporaries.append(self._new_file(counts, reserved(len(value))))

    def take_over(self, counts: Counts, value: Value, shard: int) -> _Temporary:
        """Make a temporary file of a value's. It takes as much as before, and so needs no room."""
        path = self._space.layout.new_temporary(value.charge)
        counts.add(counts.shards, value.charge, 1)
        try:
            os.rename(value.path, path)
            descriptor = self._lock(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            self._space.look_soon()
            raise
        counts.add(shard, -value.charge, -1)
        return _Temporary(path, descriptor, value.charge, reused=True)

    def _lock(self, descriptor: int) -> int:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _new_file(self, counts: Counts, nbytes: int) -> _Temporary:
        layout = self._space.layout
        path = layout.new_temporary(nbytes)
        counts.add(counts.shards, nbytes, 1)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(path, flags, 0o600)
            except FileNotFoundError:  # directories were deleted from outside
                layout.make()
                descriptor = os.open(path, flags, 0o600)
            self._lock(descriptor)
        except OSError:
            self._space.look_soon()
            raise
        return _Temporary(path, descriptor, nbytes)

    def _publish(self, group: _Group, deadline: float) -> list[bool]:
        """Give files that are whole the names of their keys; False for those that somebody has deleted from outside."""
        published: list[bool] = []
        whole = group.temporaries[: group.written]
        if not whole:
            return published
        try:
            with self._space.ledger.locked(deadline) as counts:
                for (key, _), temporary in zip(group.items, whole, strict=False):
                    published.append(self._rename(counts, temporary, key))
        finally:
            for temporary, there in zip(whole, published + [False] * len(whole), strict=False):
                if there:
                    os.close(temporary.descriptor)
                else:
                    self._abandon([temporary])
        return published

    def _rename(self, counts: Counts, temporary: _Temporary, key: bytes) -> bool:
        space = self._space
        shard, path = space.layout.shard_of(key), space.layout.value(key)
        status = os.fstat(temporary.descriptor)
        replaced = charge_of(path)
        mark(temporary.descriptor)
        counts.add(shard, charge(status.st_size, status.st_blocks), 1)
        try:
            try:
                os.rename(temporary.path, path)
            except FileNotFoundError:  # the first value of its shard, or deleted from outside
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                os.rename(temporary.path, path)
        except OSError as error:
            space.sweep(counts)
            space.count_area(counts, shard)
            if isinstance(error, FileNotFoundError):
                return False
            raise
        counts.add(counts.shards, -temporary.charge, -1)
        if replaced is not None:
            counts.add(shard, -replaced, -1)
        return True

    def _abandon(self, temporaries: Sequence[_Temporary]) -> None:
        """Remove files that won't be published. Needs no lock: their room is given back by the next sweep."""
        for temporary in temporaries:
            with suppress(OSError):
                os.unlink(temporary.path)
            # Only now: the lock that says that the writer is alive ends with it.
            os.close(temporary.descriptor)
            self._space.look_soon()
