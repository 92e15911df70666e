"""Which block is in which slot: index, pins and eviction, for slots that are somewhere else."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvplug.store.policies import LRU

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvplug.store.policies import EvictionPolicy

__all__ = ["Allocator", "SlotRef"]

_FREE, _RESERVED, _PUBLISHED = 0, 1, 2


class SlotRef(NamedTuple):
    """A slot as it was handed out: to its one owner, for one entry.

    The slot's number is what a slab understands. The generation changes whenever the slot is freed, so that whoever
    comes late with an old reference can't touch the slot's next owner. Both are plain numbers, and may travel between
    processes.
    """

    slot: int
    generation: int


#: `_new_ref(SlotRef, (slot, generation))` makes a reference at half the cost of the constructor's.
_new_ref = tuple.__new__


class Allocator:
    """Keeps track of what is in the slots of a slab, or of several slabs that are filled alike.

    An entry is *reserved* while its block is being written, and *published* when it can be found. Only a published
    entry without pins is ever evicted. The allocator touches no memory: it can live in a scheduler and direct slabs in
    other processes, to which only slot numbers (`SlotRef.slot`) travel. It is thread-safe: each call is atomic.

    The life of a slot: `reserve`, write the block, `publish` (or `abandon`). To read: `pin_prefix`, copy, `unpin`.
    Every reference must be given back exactly once, by the call that fits. References that have gone stale (the slot
    was freed since) are ignored and counted; a reference that is current, but in the wrong state (published twice,
    unpinned without a pin), is an error in the caller's code: ValueError, and nothing is changed.

    Order matters to what survives: blocks of a prefix are useless without the ones before them, so the first key of
    a batch counts as the most recently used, and the tail of a prefix is evicted before its head.

    Args:
        num_slots: Number of slots, at least 1.
        policy: The eviction policy, for as many slots; LRU by default. It belongs to the allocator from now on.

    Attributes:
        capacity: Number of slots.
        evictions: Entries evicted so far.
        refused: Keys refused a slot so far, because nothing could be evicted.
        stale: Stale references ignored so far.

    """

    def __init__(self, num_slots: int, policy: EvictionPolicy | None = None) -> None:
        if num_slots < 1:
            msg = f"an allocator needs at least one slot, got {num_slots}"
            raise ValueError(msg)
        self.capacity = num_slots
        self.evictions = 0
        self.refused = 0
        self.stale = 0
        self._policy = LRU(num_slots) if policy is None else policy
        self._lock = threading.Lock()
        self._index: dict[bytes, int] = {}
        # Per slot. A slot in use whose key is None is unreachable: it is freed when its holders are done.
        self._keys: list[bytes | None] = [None] * num_slots
        self._state = bytearray(num_slots)
        self._pins = array("I", [0]) * num_slots
        self._generation = array("Q", [0]) * num_slots
        # Freed slots are reused before untouched ones, whose memory the operating system hasn't backed yet.
        self._freed: list[int] = []
        self._untouched = 0

    @property
    def used(self) -> int:
        """Number of slots that hold something: published, being written, or still pinned after a `clear`."""
        with self._lock:
            return self._untouched - len(self._freed)

    def prefix_length(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are published. Looking changes nothing, not even what is evicted next."""
        with self._lock:
            for length, key in enumerate(keys):
                slot = self._index.get(key)
                if slot is None or self._state[slot] != _PUBLISHED:
                    return length
            return len(keys)

    def pin_prefix(self, keys: Sequence[bytes], *, used: bool = True) -> list[SlotRef]:
        """Pin the longest run of leading keys that are published, and return their slots.

        Stops at the first gap. Each of the entries stays where it is until `unpin`, and may be pinned any number of
        times.

        Args:
            keys: The keys, in order.
            used: Whether the entries count as used, now. If not, they go when it is their turn, but not before they
                are unpinned: for a store that reads what nobody has asked it for.

        """
        refs = []
        index, state, pins, generation, policy = (
            self._index,
            self._state,
            self._pins,
            self._generation,
            self._policy,
        )
        with self._lock:
            for key in keys:
                slot = index.get(key)
                if slot is None or state[slot] != _PUBLISHED:
                    break
                if pins[slot]:
                    pins[slot] += 1
                else:
                    pins[slot] = 1
                    policy.pinned(slot)
                refs.append(_new_ref(SlotRef, (slot, generation[slot])))
            if used:
                for slot, _ in reversed(refs):
                    policy.hit(slot)
        return refs

    def is_reserved(self, key: bytes) -> bool:
        """Say whether a block is being written under a key."""
        with self._lock:
            slot = self._index.get(key)
            return slot is not None and self._state[slot] == _RESERVED

    def touch_prefix(self, keys: Sequence[bytes]) -> int:
        """Count the longest run of leading keys that are published as used, and return how many there are.

        For blocks that will be wanted soon: they are evicted after all others. Nothing is pinned.
        """
        with self._lock:
            slots = []
            for key in keys:
                slot = self._index.get(key)
                if slot is None or self._state[slot] != _PUBLISHED:
                    break
                slots.append(slot)
            for slot in reversed(slots):
                self._policy.hit(slot)
        return len(slots)

    def unpin(self, refs: Sequence[SlotRef]) -> None:
        """Give back what `pin_prefix` returned, once each.

        Raises:
            ValueError: A slot isn't pinned that often.

        """
        with self._lock:
            slots = self._current(refs)
            pins = self._pins
            for slot, times in (Counter(slots) if _has_repeats(slots) else dict.fromkeys(slots, 1)).items():
                if pins[slot] < times:  # only what is published has pins
                    msg = f"slot {slot} is unpinned more often than it was pinned"
                    raise ValueError(msg)
            for slot in reversed(slots):
                if pins[slot] > 1:
                    pins[slot] -= 1
                else:
                    self._unpin_last(slot)

    def reserve(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Return a slot to write to for each key that is neither published nor being written.

        The result has one item per key, in order. None means that there is nothing to write: the key is there already,
        which counts as use, is being written, comes twice in the batch, or no slot could be had (counted in `refused`).
        Slots are found among free ones first, then by eviction; what is pinned, reserved, or named in this batch is
        never evicted. A tier with nothing to evict refuses in O(1) per key.
        """
        refs: list[SlotRef | None] = []
        index, state, generation = self._index, self._state, self._generation
        with self._lock:
            # Blocks of this batch that are there already are part of the prefix that is being completed.
            present = [slot for slot in map(index.get, keys) if slot is not None and state[slot] == _PUBLISHED]
            for slot in reversed(present):
                self._pins[slot] += 1
                if self._pins[slot] == 1:
                    self._policy.pinned(slot)
                self._policy.hit(slot)
            try:
                full = False
                for key in keys:
                    if key in index:
                        refs.append(None)
                        continue
                    taken = None if full else self._take()
                    if taken is None:
                        full = True
                        self.refused += 1
                        refs.append(None)
                        continue
                    index[key] = taken
                    self._keys[taken] = key
                    state[taken] = _RESERVED
                    refs.append(_new_ref(SlotRef, (taken, generation[taken])))
            finally:
                for slot in present:
                    if self._pins[slot] > 1:
                        self._pins[slot] -= 1
                    else:
                        self._unpin_last(slot)
        return refs

    def publish(self, refs: Sequence[SlotRef]) -> int:
        """Let entries be found whose blocks have been written, and return how many can be found now.

        A slot reserved before a `clear`, or whose key was discarded since, is freed instead.

        Raises:
            ValueError: A slot isn't reserved.

        """
        published = 0
        with self._lock:
            slots = self._reserved(refs)
            for slot in reversed(slots):
                key = self._keys[slot]
                if key is None:
                    self._free(slot)
                    continue
                self._state[slot] = _PUBLISHED
                self._policy.added(slot, key)
                published += 1
        return published

    def abandon(self, refs: Sequence[SlotRef]) -> None:
        """Free slots whose write failed. Nobody may write to them any more. Their keys are absent again.

        Raises:
            ValueError: A slot isn't reserved.

        """
        with self._lock:
            for slot in self._reserved(refs):
                self._forget(slot)
                self._free(slot)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Make keys absent, whether they are published or being written. Unknown keys are ignored.

        A slot that is pinned or being written is freed when its holders are done.
        """
        with self._lock:
            for key in keys:
                slot = self._index.get(key)
                if slot is not None:
                    self._discard(slot)

    def clear(self) -> bool:
        """Make all keys absent, and return whether all slots are free now.

        Slots that are pinned or being written stay with their holders, can't be found any more, and are freed by
        `unpin`, `publish` or `abandon`.
        """
        with self._lock:
            self._policy.clear()
            for slot in self._index.values():
                self._keys[slot] = None
                if self._state[slot] == _PUBLISHED and not self._pins[slot]:
                    self._free(slot)
            self._index.clear()
            return self._untouched == len(self._freed)

    # What follows is called with the lock held.

    def _current(self, refs: Sequence[SlotRef]) -> list[int]:
        """Return the slots of those references that are not stale."""
        slots = []
        capacity, current = self.capacity, self._generation
        for slot, generation in refs:
            if not 0 <= slot < capacity or generation > current[slot]:
                msg = f"slot {slot}, generation {generation} was never handed out here"
                raise ValueError(msg)
            if generation == current[slot]:
                slots.append(slot)
        self.stale += len(refs) - len(slots)
        return slots

    def _reserved(self, refs: Sequence[SlotRef]) -> list[int]:
        slots = self._current(refs)
        if _has_repeats(slots):
            raise ValueError("a slot comes twice")
        for slot in slots:
            if self._state[slot] != _RESERVED:
                msg = f"slot {slot} isn't reserved"
                raise ValueError(msg)
        return slots

    def _unpin_last(self, slot: int) -> None:
        self._pins[slot] = 0
        if self._keys[slot] is None:
            self._free(slot)
        else:
            self._policy.unpinned(slot)

    def _take(self) -> int | None:
        """Return a slot that is free, if need be by eviction. None if there is nothing to evict."""
        if self._freed:
            return self._freed.pop()
        if self._untouched < self.capacity:
            self._untouched += 1
            return self._untouched - 1
        victim = self._policy.victim()
        if victim is not None:
            self.evictions += 1
            key = self._keys[victim]
            assert key is not None  # what can't be found has no place in the policy
            del self._index[key]
            self._generation[victim] += 1
        return victim

    def _discard(self, slot: int) -> None:
        self._forget(slot)
        if self._state[slot] == _PUBLISHED:
            self._policy.removed(slot)
            if not self._pins[slot]:
                self._free(slot)

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        if key is not None:
            del self._index[key]
            self._keys[slot] = None

    def _free(self, slot: int) -> None:
        self._state[slot] = _FREE
        self._generation[slot] += 1
        self._freed.append(slot)


def _has_repeats(slots: list[int]) -> bool:
    return len(set(slots)) != len(slots)
