"""S3-FIFO: three queues, in which what is used once passes through a small one."""

from __future__ import annotations

from array import array

from kvplug.store.policies.base import EvictionPolicy, register_policy
from kvplug.store.policies.ghosts import GhostQueue

__all__ = ["S3FIFO"]

_SMALL_SHARE = 0.1

#: Of a slot's flags: how often it was used, while it is pinned; and two bits.
_USES = _MAX_USES = 3
_IN_MAIN = 4
_PINNED = 8

_ABSENT = -1

#: Used candidates that evictions pass over: so many each on average, and of what earlier ones didn't need, up to so
#: many at once. The original has no such bound: where everything was used three times, one eviction there passes over
#: everything three times. On skewed traces, with and without scans, the bound costs less than one hit in 500 lookups.
_SPARED = 1
_SPARED_AT_ONCE = 32


@register_policy("s3fifo")
class S3FIFO(EvictionPolicy):
    """Evict what wasn't used since it was stored, soon; what was used, in the order in which it was, later.

    New entries queue in a small queue, of a tenth of the slots. At its end, those that were used go on to the main
    queue; the others are evicted, and their keys are remembered, as many as the main queue has room for. What is
    stored again while it is remembered goes to the main queue at once. At the end of the main queue an entry that was
    used goes round again, once for each use, up to three.

    After "FIFO queues are all you need for cache eviction" (Yang et al., SOSP 2023), with two differences. One use is
    enough to reach the main queue (there, two): a block is used once per request. And evictions pass over one used
    entry each on average at most, and 32 at once, so that their cost doesn't depend on how many there are.

    A pinned slot keeps its place. If it comes to a queue's end, it is put aside, and enters a queue again once it is
    unpinned: the main one if it was used or was there before, else the small one.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._candidates = 0
        self._to_spare = 0
        self._small_target = max(1, int(num_slots * _SMALL_SHARE))
        # Each queue's two ends meet in an entry behind those of the slots.
        self._small, self._main = num_slots, num_slots + 1
        self.clear()

    def added(self, slot: int, key: bytes) -> None:
        """Queue the slot: in the main queue if its key was evicted not long ago, or else in the small one."""
        self._fingerprints[slot] = fingerprint = hash(key)
        self._uses[slot] = 0
        if self._ghosts.discard(fingerprint):
            self._flags[slot] = _IN_MAIN
            end = self._main
        else:
            self._flags[slot] = 0
            self._small_length += 1
            end = self._small
        self._candidates += 1
        # As in `_append`, whose call would take as long as all of this.
        previous = self._previous
        last = previous[end]
        self._next[last] = previous[end] = slot
        previous[slot] = last
        self._next[slot] = end

    def hit(self, slot: int) -> None:
        """Count a use."""
        flags = self._flags[slot]
        if flags & _PINNED:
            if flags & _USES < _MAX_USES:
                self._flags[slot] = flags + 1
        elif self._uses[slot] < _MAX_USES:
            self._uses[slot] += 1

    def pinned(self, slot: int) -> None:
        """Remember that the slot is pinned."""
        self._flags[slot] |= _PINNED | self._uses[slot]
        self._uses[slot] = 0
        self._candidates -= 1

    def unpinned(self, slot: int) -> None:
        """Forget that the slot was pinned; if it was put aside, it enters a queue again."""
        flags = self._flags[slot]
        self._uses[slot] = flags & _USES
        self._flags[slot] = flags & _IN_MAIN
        self._candidates += 1
        if self._next[slot] == _ABSENT:
            if flags & (_USES | _IN_MAIN):
                self._flags[slot] = _IN_MAIN
                self._append(slot, self._main)
            else:
                self._append(slot, self._small)
                self._small_length += 1

    def removed(self, slot: int) -> None:
        """Take the slot out of its queue, if it is in one."""
        following, previous, flags = self._next[slot], self._previous[slot], self._flags[slot]
        if following != _ABSENT:
            self._next[previous] = following
            self._previous[following] = previous
            self._next[slot] = _ABSENT
            if not flags & _IN_MAIN:
                self._small_length -= 1
        if not flags & _PINNED:
            self._candidates -= 1

    def victim(self) -> int | None:
        """Take out the next candidate: of the small queue if that has its share, or else of the main one."""
        if not self._candidates:
            return None
        following, previous, uses, flags = self._next, self._previous, self._uses, self._flags
        small, main = self._small, self._main
        end = small if self._small_length >= self._small_target else main
        to_spare = min(self._to_spare + _SPARED, _SPARED_AT_ONCE)
        while True:
            slot = first = following[end]
            if uses[slot] and to_spare:
                # It goes to the end of the main queue, and so do the used candidates that follow it, all at once.
                before = to_spare
                if end == small:
                    while uses[slot] and to_spare:
                        uses[slot] = 0
                        flags[slot] = _IN_MAIN
                        slot = following[slot]
                        to_spare -= 1
                    self._small_length -= before - to_spare
                else:
                    while (times := uses[slot]) and to_spare:
                        uses[slot] = times - 1
                        slot = following[slot]
                        to_spare -= 1
                last = previous[slot]
                following[end], previous[slot] = slot, end
                tail = previous[main]  # only now: where all of the main queue was spared, this is its end
                following[tail], previous[first] = first, tail
                following[last], previous[main] = main, last
            elif slot == end:  # all that it had was spared, or is pinned
                end = main if end == small else small
            else:
                second = following[end] = following[slot]
                previous[second] = end
                following[slot] = _ABSENT
                if end == small:
                    self._small_length -= 1
                if not flags[slot] & _PINNED:
                    break
        self._to_spare = to_spare
        self._candidates -= 1
        if end == small:
            self._ghosts.add(self._fingerprints[slot])
        return slot

    def clear(self) -> None:
        """Empty all queues."""
        # Both queues are doubly linked lists in the same two arrays, so that a part of one is put into the other, or
        # at its own end, by changing the links at the part's ends.
        self._next = array("i", [_ABSENT]) * (self._num_slots + 2)
        self._previous = array("i", self._next)
        for end in (self._small, self._main):
            self._next[end] = self._previous[end] = end
        self._small_length = 0
        self._ghosts = GhostQueue(max(1, self._num_slots - self._small_target))
        self._fingerprints = array("q", [0]) * self._num_slots
        # How often each was used; 0 where it is pinned, and for the queues' ends: one look tells what is spared.
        self._uses = bytearray(self._num_slots + 2)
        self._flags = bytearray(self._num_slots)
        self._candidates = 0
        self._to_spare = 0

    def _append(self, slot: int, end: int) -> None:
        previous = self._previous
        last = previous[end]
        self._next[last] = previous[end] = slot
        previous[slot] = last
        self._next[slot] = end
