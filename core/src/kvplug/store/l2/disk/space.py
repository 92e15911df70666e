"""Room in the directory: what may be written, and what goes for it.

All that makes files begin or cease to exist is here, and runs with the ledger locked, so that the numbers in it and the
files belong together. Writing the bytes needs no lock: room for them has been set aside before the first.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
import random
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvplug.store.l2.disk.layout import Layout, Value, charge, overhead, reserved, shards_for
from kvplug.store.l2.disk.ledger import Counts, Ledger, ledger_bytes

__all__ = ["NO_ROOM", "Space", "Temporary"]

#: What the file system says when it is full, or its user's share of it.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

#: Shards are read at random until so many values were seen, or so many shards read, and the oldest of them go.
_SEEN_VALUES = 16
_SEEN_SHARDS = 4
#: Of what was seen, one in so many goes, but not more than so many at once. Reading a shard costs what it holds: this
#: makes the cost of one eviction the same in small and large directories, and bounds for how long others wait.
_EVICTED_SHARE = 16
_EVICTED_AT_ONCE = 256

#: Seconds between two looks for what others changed: one shard each time, and the temporary files.
_PATROL_SECONDS = 1.0
_NEVER = float("-inf")
#: Seconds for which the ledger is locked in one go while shards are counted, or a lot is evicted.
_LOCKED_SECONDS = 0.05
#: Seconds in which others may have it, in between.
_PAUSE_SECONDS = 5e-3


@dataclass(frozen=True)
class Temporary:
    """A file that is being written.

    Its writer has a lock on it for as long as the descriptor is open. The kernel ends the lock with the process, however
    that ends, which is how a dead writer's file is told from a slow one's.
    """

    path: str
    descriptor: int
    charge: int


class Space:
    """The directory's files and their number of bytes, kept below a cap with all processes that share it.

    Args:
        root: The directory.
        capacity_bytes: The cap: bytes on the disk, directories, ledger and temporary files included.
        value_bytes: Bytes of the longest value.

    """

    def __init__(self, root: str, capacity_bytes: int, value_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._value_bytes = value_bytes
        self.layout = Layout(root)
        self._limit = 0
        self.ledger = Ledger(self.layout.ledger, self._prepare)
        self._patrolled = time.monotonic()
        self._patrol_shard = random.randrange(1 << 16)  # noqa: S311 - processes shouldn't all begin with the same

    def _prepare(self, recorded: int | None) -> int:
        shards = self.layout.find_shards() or recorded or shards_for(self.capacity_bytes, self._value_bytes)
        self.layout = Layout(self.layout.root, shards)
        self.layout.make()
        self._limit = self.capacity_bytes - overhead(shards, ledger_bytes(shards))
        return shards

    def used(self, counts: Counts) -> int:
        """Return the bytes of all that is there."""
        return counts.used + self.capacity_bytes - self._limit

    def holds(self, size: int) -> bool:
        """Say whether a value of `size` bytes fits at all. Right once something has locked the ledger."""
        return reserved(size) <= self._limit

    def count(self, deadline: float) -> bool:
        """Count what nobody has counted since the machine was started, and return whether all is known.

        Ends at the deadline at the latest; other calls, of this or any process, go on where it ended.
        """
        while True:
            with self.ledger.locked(deadline) as counts:
                if self._count_unknown(counts, _pause(deadline)):
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_SECONDS)

    def _count_unknown(self, counts: Counts, pause: float) -> bool:
        for area in counts.unknown:
            self._count_area(counts, area)
            if time.monotonic() >= pause:
                break
        return not counts.unknown

    def _count_area(self, counts: Counts, area: int) -> Sequence[Value]:
        """Count a shard, or the temporary files, and return the shard's values."""
        if area == counts.shards:
            self._sweep(counts)
            return ()
        listing = self.layout.list_values(area)
        if listing is None:
            counts.set(area, 0, 0)
            return ()
        values, nbytes = listing
        counts.set(area, nbytes, len(values))
        return values

    def _sweep(self, counts: Counts) -> None:
        """Remove the temporary files whose writers are dead, and count the others."""
        kept = []
        for path, nbytes in self.layout.list_temporary():
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            except BlockingIOError:
                kept.append(nbytes)
            finally:
                os.close(descriptor)
        counts.set(counts.shards, sum(kept), len(kept))

    def reserve(self, size: int, deadline: float) -> Temporary | None:
        """Set room aside for a value, and make the file to write it to; None if there is no room to be had.

        There is none either where it would take long to know, or to make: others need the ledger too. Later calls go on.

        Args:
            size: Bytes of the value.
            deadline: Of `time.monotonic`.

        Raises:
            TierTimeoutError: The deadline has passed.
            OSError: The file can't be made.

        """
        with self.ledger.locked(deadline) as counts:
            self._patrol(counts)
            nbytes, pause = reserved(size), _pause(deadline)
            if not self._count_unknown(counts, pause) or not self._make_room(counts, nbytes, pause):
                return None
            path = self.layout.new_temporary(nbytes)
            counts.add(counts.shards, nbytes, 1)
            try:
                descriptor = self._make_file(path)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(descriptor)
                    raise
            except OSError:
                self._patrolled = _NEVER
                raise
            return Temporary(path, descriptor, nbytes)

    def _make_file(self, path: str) -> int:
        # Readable, too: direct writes may have to end with a buffered one, which reads the page first.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:  # directories were deleted from outside
            self.layout.make()
            return os.open(path, flags, 0o600)

    def publish(self, temporary: Temporary, key: bytes, deadline: float) -> bool:
        """Give a file that was written its key's name; False if somebody has deleted it from outside.

        Raises:
            TierTimeoutError: The deadline has passed.
            OSError: It can't be renamed.

        """
        with self.ledger.locked(deadline) as counts:
            shard, path = self.layout.shard_of(key), self.layout.value(key)
            status = os.fstat(temporary.descriptor)
            replaced = _charge_of(path)
            counts.add(shard, charge(status.st_size, status.st_blocks), 1)
            try:
                self._rename(temporary.path, path)
            except OSError as error:
                self._sweep(counts)
                self._count_area(counts, shard)
                if isinstance(error, FileNotFoundError):
                    return False
                raise
            counts.add(counts.shards, -temporary.charge, -1)
            if replaced is not None:
                counts.add(shard, -replaced, -1)
            return True

    def _rename(self, source: str, path: str) -> None:
        try:
            os.rename(source, path)
        except FileNotFoundError:  # the first value of its shard, or deleted from outside
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.rename(source, path)

    def abandon(self, temporary: Temporary) -> None:
        """Remove a file that won't be published. Needs no lock: its room is given back by the next sweep."""
        with suppress(OSError):
            os.unlink(temporary.path)
        self._patrolled = _NEVER

    def remove(self, keys: Sequence[bytes], deadline: float) -> None:
        """Remove values; those that aren't there are ignored.

        Raises:
            TierTimeoutError: The deadline has passed.
            OSError: A file can't be removed.

        """
        with self.ledger.locked(deadline) as counts:
            for key in keys:
                path = self.layout.value(key)
                taken = _charge_of(path)
                if taken is not None:
                    self._unlink(counts, self.layout.shard_of(key), path, taken)

    def free(self, nbytes: int, deadline: float) -> bool:
        """Evict values that take `nbytes` at least, and return whether there were any. For a file system that is full."""
        with self.ledger.locked(deadline) as counts:
            self._sweep(counts)
            target, pause = counts.used - nbytes, _pause(deadline)
            while counts.used > target:
                if time.monotonic() >= pause or not self._evict(counts):
                    return False
            return True

    def shrink(self, deadline: float) -> bool:
        """Evict until the cap holds, and return whether it does. It may not where the cap was larger before."""
        while True:
            with self.ledger.locked(deadline) as counts:
                pause = _pause(deadline)
                while counts.used > self._limit and time.monotonic() < pause:
                    if not self._evict(counts):
                        break
                if counts.used <= self._limit:
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_SECONDS)

    def _make_room(self, counts: Counts, nbytes: int, pause: float) -> bool:
        if counts.bytes_in(counts.shards) + nbytes > self._limit:
            self._sweep(counts)
            if counts.bytes_in(counts.shards) + nbytes > self._limit:
                return False  # others are writing that much: nothing that can be evicted would help
        while counts.used + nbytes > self._limit:
            if time.monotonic() >= pause or not self._evict(counts):
                return False
        return True

    def _evict(self, counts: Counts) -> bool:
        """Read a few shards, count them anew, and evict the oldest of what they hold; False if all are empty.

        May end without having evicted anything, where a shard held less than was thought.
        """
        occupied = counts.occupied
        if not len(occupied):
            return False
        before = counts.used
        seen: list[tuple[Value, int]] = []
        for index in random.sample(range(len(occupied)), min(_SEEN_SHARDS, len(occupied))):
            shard = int(occupied[index])
            seen += [(value, shard) for value in self._count_area(counts, shard)]
            if len(seen) >= _SEEN_VALUES:
                break
        if counts.used < before:
            return True
        number = min(max(1, len(seen) // _EVICTED_SHARE), _EVICTED_AT_ONCE)
        for value, shard in heapq.nsmallest(number, seen):
            self._unlink(counts, shard, value.path, value.charge)
        return True

    def _unlink(self, counts: Counts, shard: int, path: str, taken: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)
        counts.add(shard, -taken, -1)

    def _patrol(self, counts: Counts) -> None:
        """See once in a while what others have changed without the ledger: files deleted from outside, dead writers."""
        now = time.monotonic()
        if now - self._patrolled >= _PATROL_SECONDS:
            self._patrolled = now
            self._sweep(counts)
            self._count_area(counts, self._patrol_shard % counts.shards)
            self._patrol_shard += 1


def _charge_of(path: str) -> int | None:
    """Return the bytes that a value's file takes, or None if there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return charge(status.st_size, status.st_blocks) if stat.S_ISREG(status.st_mode) else None


def _pause(deadline: float) -> float:
    """Return when to let others have the ledger."""
    return min(deadline, time.monotonic() + _LOCKED_SECONDS)
