"""S3-FIFO: three queues, in which what is used once passes through a small one."""

from __future__ import annotations

from array import array

from kvplug.store.policies.base import EvictionPolicy, register_policy
from kvplug.store.policies.ghosts import GhostQueue

__all__ = ["S3FIFO"]

_SMALL_SHARE = 0.1

#: A slot's state: how often it was used, up to three times, and two bits.
_USES = _MAX_USES = 3
_IN_MAIN = 4
_PINNED = 8
_COUNTED = _USES | _PINNED
_SPARED = _IN_MAIN - 1

_ABSENT = -1

#: Used candidates that one eviction passes over. The original has no such bound: where everything was used three times,
#: one eviction there passes over everything three times. On skewed traces, with and without scans, it costs at most one
#: hit in a hundred lookups.
_MAX_SPARED = 4


@register_policy("s3fifo")
class S3FIFO(EvictionPolicy):
    """Evict what wasn't used since it was stored, soon; what was used, in the order in which it was, later.

    New entries queue in a small queue, of a tenth of the slots. At its end, those that were used go on to the main
    queue; the others are evicted, and their keys are remembered, as many as the main queue has room for. What is
    stored again while it is remembered goes to the main queue at once. At the end of the main queue an entry that was
    used goes round again, once for each use, up to three.

    After "FIFO queues are all you need for cache eviction" (Yang et al., SOSP 2023), with two differences. One use is
    enough to reach the main queue (there, two): a block is used once per request. And one eviction passes over at most
    4 used entries, so that its cost doesn't depend on how many there are.

    A pinned slot keeps its place. If it comes to a queue's end, it is put aside, and enters the main queue once it is
    unpinned.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._small_target = max(1, int(num_slots * _SMALL_SHARE))
        # Each queue's two ends meet in an entry behind those of the slots.
        self._small, self._main = num_slots, num_slots + 1
        self.clear()

    def added(self, slot: int, key: bytes) -> None:
        """Queue the slot: in the main queue if its key was evicted not long ago, or else in the small one."""
        fingerprint = hash(key)
        self._fingerprints[slot] = fingerprint
        if self._ghosts.discard(fingerprint):
            self._state[slot] = _IN_MAIN
            self._append(slot, self._main)
        else:
            self._state[slot] = 0
            self._append(slot, self._small)
            self._small_length += 1
        self._candidates += 1

    def hit(self, slot: int) -> None:
        """Count a use."""
        if self._state[slot] & _USES < _MAX_USES:
            self._state[slot] += 1

    def pinned(self, slot: int) -> None:
        """Remember that the slot is pinned."""
        self._state[slot] |= _PINNED
        self._candidates -= 1

    def unpinned(self, slot: int) -> None:
        """Forget that the slot was pinned; if it was put aside, it enters the main queue."""
        self._state[slot] &= ~_PINNED
        self._candidates += 1
        if self._next[slot] == _ABSENT:
            self._state[slot] |= _IN_MAIN
            self._append(slot, self._main)

    def removed(self, slot: int) -> None:
        """Take the slot out of its queue, if it is in one."""
        following, previous, state = self._next[slot], self._previous[slot], self._state[slot]
        if following != _ABSENT:
            self._next[previous] = following
            self._previous[following] = previous
            self._next[slot] = _ABSENT
            if not state & _IN_MAIN:
                self._small_length -= 1
        if not state & _PINNED:
            self._candidates -= 1

    def victim(self) -> int | None:
        """Take out the next candidate: of the small queue if that has more than its share, or else of the main one."""
        if not self._candidates:
            return None
        following, previous, state, main = self._next, self._previous, self._state, self._main
        to_spare = _MAX_SPARED
        while True:
            excess = self._small_length - self._small_target
            from_small = excess >= 0 or following[main] == main
            end = self._small if from_small else main
            first = slot = following[end]
            if to_spare and 0 < (uses := state[slot] & _COUNTED) < _PINNED:
                # The used candidates that the queue begins with go to the end of the main queue all at once. Not more
                # than what exceeds the small queue's share; one, where it is the main queue that has nothing.
                limit = to_spare if excess < 0 and not from_small else min(to_spare, max(1, excess + 1))
                count = 0
                while True:
                    state[slot] = _IN_MAIN if from_small else uses + _SPARED
                    last, slot = slot, following[slot]
                    count += 1
                    if count == limit or slot == end or not 0 < (uses := state[slot] & _COUNTED) < _PINNED:
                        break
                following[end] = slot
                previous[slot] = end
                tail = previous[main]
                following[tail], previous[first] = first, tail
                following[last], previous[main] = main, last
                to_spare -= count
                if from_small:
                    self._small_length -= count
                    continue
                if to_spare or slot == main:
                    continue
            second = following[end] = following[slot]
            previous[second] = end
            following[slot] = _ABSENT
            if from_small:
                self._small_length -= 1
            if not state[slot] & _PINNED:
                break
        self._candidates -= 1
        if from_small:
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
        self._state = bytearray(self._num_slots)
        self._candidates = 0

    def _append(self, slot: int, end: int) -> None:
        previous = self._previous
        last = previous[end]
        self._next[last] = previous[end] = slot
        previous[slot] = last
        self._next[slot] = end
