"""S3-FIFO: three queues, in which what is used once passes through a small one."""

from __future__ import annotations

from array import array

from kvplug.store.policies.base import EvictionPolicy, register_policy
from kvplug.store.policies.ghosts import GhostQueue
from kvplug.store.policies.slot_queue import SlotQueue

__all__ = ["S3FIFO"]

_SMALL_SHARE = 0.1
_MAX_USES = 3

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
        self.clear()

    def added(self, slot: int, key: bytes) -> None:
        """Queue the slot: in the main queue if its key was evicted not long ago, or else in the small one."""
        fingerprint = hash(key)
        self._fingerprints[slot] = fingerprint
        self._uses[slot] = 0
        (self._main if self._ghosts.discard(fingerprint) else self._small).append(slot)
        self._candidates += 1

    def hit(self, slot: int) -> None:
        """Count a use."""
        if self._uses[slot] < _MAX_USES:
            self._uses[slot] += 1

    def pinned(self, slot: int) -> None:
        """Remember that the slot is pinned."""
        self._pinned[slot] = 1
        self._candidates -= 1

    def unpinned(self, slot: int) -> None:
        """Forget that the slot was pinned; if it was put aside, it enters the main queue."""
        self._pinned[slot] = 0
        self._candidates += 1
        if slot not in self._small and slot not in self._main:
            self._main.append(slot)

    def removed(self, slot: int) -> None:
        """Take the slot out of its queue, if it is in one."""
        for queue in (self._small, self._main):
            if slot in queue:
                queue.remove(slot)
        if self._pinned[slot]:
            self._pinned[slot] = 0
        else:
            self._candidates -= 1

    def victim(self) -> int | None:
        """Take out the next candidate: of the small queue if that has more than its share, or else of the main one."""
        if not self._candidates:
            return None
        small, main, pinned, uses = self._small, self._main, self._pinned, self._uses
        to_spare = _MAX_SPARED
        while True:
            from_small = len(small) >= self._small_target or not len(main)
            slot = (small if from_small else main).pop()
            assert slot is not None  # some queue has a candidate
            if pinned[slot]:
                continue
            if not (uses[slot] and to_spare):
                break
            to_spare -= 1
            uses[slot] = 0 if from_small else uses[slot] - 1
            main.append(slot)
        self._candidates -= 1
        if from_small:
            self._ghosts.add(self._fingerprints[slot])
        return slot

    def clear(self) -> None:
        """Empty all queues."""
        self._small = SlotQueue(self._num_slots)
        self._main = SlotQueue(self._num_slots)
        self._ghosts = GhostQueue(max(1, self._num_slots - self._small_target))
        self._fingerprints = array("q", [0]) * self._num_slots
        self._uses = bytearray(self._num_slots)
        self._pinned = bytearray(self._num_slots)
        self._candidates = 0
