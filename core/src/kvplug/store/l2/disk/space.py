"""Room in the directory: how much there is, and what goes for it.

Whatever makes files begin or cease to exist, here and in `kvplug.store.l2.disk.writing`, runs with the ledger locked,
so that the numbers in it and the files belong together.
"""

# Paths are plain strings: these are called for each value.
# ruff: noqa: PTH108

from __future__ import annotations

import fcntl
import heapq
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from kvplug.store.l2.disk.layout import Layout, Value, charge_of, look, overhead, reserved, shards_for
from kvplug.store.l2.disk.ledger import Counts, Ledger, ledger_bytes
from kvplug.store.l2.disk.reading import IDLE_NS

__all__ = ["Reuse", "Space", "pause"]

#: Shards are read at random until so many values were seen, one of them idle, or so many shards read.
_SEEN_VALUES = 16
_SEEN_SHARDS = 4
#: Of what was seen, one in so many is noted, to go when room is wanted, but not more than so many. Reading a shard
#: costs what it holds: this makes the cost of one eviction the same in small and large directories.
_NOTED_SHARE = 8
_NOTED_AT_ONCE = 256

#: Seconds between two looks for what others changed: one shard each time, and the temporary files.
_PATROL_SECONDS = 1.0
_NEVER = float("-inf")
#: Seconds for which the ledger is locked in one go while shards are counted, or a lot is evicted.
_LOCKED_SECONDS = 0.25
#: Seconds in which others may have it, in between.
_PAUSE_SECONDS = 5e-3


class Reuse(Protocol):
    """Takes over files of evicted values."""

    #: What was taken over.
    files: list[Any]

    def take(self, counts: Counts, value: Value, shard: int) -> bool:
        """Take a value's file over, from its shard, and write that down; False to have it removed."""


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
        self.ledger = Ledger(self.layout.ledger, self._prepare)
        #: Bytes that values and temporary files may take. Known once something has locked the ledger.
        self.limit = 0
        #: The next values to go, the oldest last, with their shards. Used with the ledger locked.
        self._oldest: list[tuple[Value, int]] = []
        self._patrolled = time.monotonic()
        self._patrol_shard = random.randrange(1 << 16)  # noqa: S311 - processes shouldn't all begin with the same

    def _prepare(self, recorded: int | None) -> int:
        shards = self.layout.find_shards() or recorded or shards_for(self.capacity_bytes, self._value_bytes)
        self.layout = Layout(self.layout.root, shards)
        self.layout.make()
        self._oldest = []
        self.limit = self.capacity_bytes - overhead(shards, ledger_bytes(shards))
        return shards

    def used(self, counts: Counts) -> int:
        """Return the bytes of all that is there."""
        return counts.used + self.capacity_bytes - self.limit

    def holds(self, size: int) -> bool:
        """Say whether a value of `size` bytes fits at all. Right once something has locked the ledger."""
        return reserved(size) <= self.limit

    def count(self, deadline: float) -> bool:
        """Count what nobody has counted since the machine was started, and return whether all is known.

        Removes what dead writers have left. Ends at the deadline at the latest; other calls, of this or any process, go
        on where it ended.
        """
        swept = False
        while True:
            with self.ledger.locked(deadline) as counts:
                if not swept:
                    self.sweep(counts)
                    swept = True
                if self.count_unknown(counts, pause(deadline)):
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_SECONDS)

    def count_unknown(self, counts: Counts, until: float) -> bool:
        """Count unknown areas until it is time for a pause, and return whether all are known."""
        for area in sorted(counts.unknown):
            self.count_area(counts, area)
            if time.monotonic() >= until:
                break
        return not counts.unknown

    def count_area(self, counts: Counts, area: int) -> Sequence[Value]:
        """Count a shard, or the temporary files, and return the shard's values."""
        if area == counts.shards:
            self.sweep(counts)
            return ()
        listing = self.layout.list_values(area)
        if listing is None:
            counts.set(area, 0, 0)
            return ()
        values, nbytes = listing
        counts.set(area, nbytes, len(values))
        return values

    def sweep(self, counts: Counts) -> None:
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

    def remove(self, keys: Sequence[bytes], deadline: float) -> None:
        """Remove values; those that aren't there are ignored.

        Raises:
            TierTimeoutError: The deadline has passed.
            OSError: A file can't be removed.

        """
        with self.ledger.locked(deadline) as counts:
            for key in keys:
                path = self.layout.value(key)
                taken = charge_of(path)
                if taken is not None:
                    self._unlink(counts, self.layout.shard_of(key), path, taken)

    def free(self, nbytes: int, deadline: float) -> bool:
        """Evict `nbytes`, or what there is, whatever the cap; return whether anything went."""
        with self.ledger.locked(deadline) as counts:
            self.sweep(counts)
            before, until = counts.used, pause(deadline)
            while counts.used > before - nbytes and time.monotonic() < until and self._evict(counts):
                pass
            return counts.used < before

    def shrink(self, deadline: float) -> bool:
        """Evict until the cap holds, and return whether it does. It may not where the cap was larger before."""
        while True:
            with self.ledger.locked(deadline) as counts:
                until = pause(deadline)
                while counts.used > self.limit and time.monotonic() < until:
                    if not self._evict(counts):
                        break
                if counts.used <= self.limit:
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_SECONDS)

    def make_room(self, counts: Counts, nbytes: int, until: float, reuse: Reuse | None = None) -> bool:
        """Evict until there is room for `nbytes`, or it is time for a pause, and return whether there is.

        Args:
            counts: The ledger.
            nbytes: Bytes that are wanted.
            until: When to end, of `time.monotonic`.
            reuse: Takes over the files of evicted values, which are removed otherwise. What it took counts as room.

        """
        if counts.bytes_in(counts.shards) + nbytes > self.limit:
            self.sweep(counts)
            if counts.bytes_in(counts.shards) + nbytes > self.limit:
                return False  # others are writing that much: nothing that can be evicted would help
        while counts.used + nbytes > self.limit and not (reuse and reuse.files):
            if time.monotonic() >= until or not self._evict(counts, reuse):
                return False
        return True

    def _evict(self, counts: Counts, reuse: Reuse | None = None) -> bool:
        """Evict one value; False if all shards are empty.

        May end without having evicted anything, where a shard held less than was thought.
        """
        while self._oldest:
            listed, shard = self._oldest.pop()
            value = look(listed.path)
            # Not if somebody has used it, or written another one, since it was listed.
            if value is not None and value.used_ns == listed.used_ns:
                if reuse is None or not reuse.take(counts, value, shard):
                    self._unlink(counts, shard, value.path, value.charge)
                return True
        return self._find_oldest(counts)

    def _find_oldest(self, counts: Counts) -> bool:
        """Read a few shards, count them anew, and note the oldest of what they hold; False if all are empty."""
        occupied = counts.occupied
        if not len(occupied):
            return False
        seen: list[tuple[Value, int]] = []
        idle_since = time.time_ns() - IDLE_NS
        idle = False
        for index in random.sample(range(len(occupied)), min(_SEEN_SHARDS, len(occupied))):
            shard = int(occupied[index])
            seen += [(value, shard) for value in self.count_area(counts, shard)]
            idle = any(value.used_ns < idle_since for value, _ in seen)
            if idle and len(seen) >= _SEEN_VALUES:
                break
        number = min(max(1, len(seen) // _NOTED_SHARE), _NOTED_AT_ONCE)
        oldest = heapq.nsmallest(number, seen)
        if idle:  # then the files of the others, which can't be written over, may stay
            oldest = [(value, shard) for value, shard in oldest if value.used_ns < idle_since]
        self._oldest = oldest[::-1]
        return True

    def _unlink(self, counts: Counts, shard: int, path: str, taken: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)
        counts.add(shard, -taken, -1)

    def look_soon(self) -> None:
        """Let the next `patrol` look, whenever the last one was: there may be something that isn't counted right."""
        self._patrolled = _NEVER

    def patrol(self, counts: Counts) -> None:
        """See once in a while what others have changed without the ledger: files deleted from outside, dead writers."""
        now = time.monotonic()
        if now - self._patrolled >= _PATROL_SECONDS:
            self._patrolled = now
            self.sweep(counts)
            self.count_area(counts, self._patrol_shard % counts.shards)
            self._patrol_shard += 1


def pause(deadline: float) -> float:
    """Return when to let others have the ledger, which was locked just now."""
    return min(deadline, time.monotonic() + _LOCKED_SECONDS)
