"""What is known of the block in each slot beside what the allocator knows: tiers that have it, and uses."""

from __future__ import annotations

from array import array

__all__ = ["SlotNotes"]

_MAX_HITS = 255


class SlotNotes:
    """A few bytes for each slot. Not safe between threads: whoever has it has a lock.

    Tiers are the bits of small numbers, so there can be eight.

    Args:
        num_slots: Slots are numbered `0..num_slots - 1`.

    """

    def __init__(self, num_slots: int) -> None:
        self._keys: list[bytes | None] = [None] * num_slots
        self._generation = array("Q", [0]) * num_slots
        self._complete = bytearray(num_slots)
        self._hits = bytearray(num_slots)
        #: Tiers that have the block, and those that are being written to. Per slot.
        self.stored = bytearray(num_slots)
        self.pending = bytearray(num_slots)

    def begin(self, slot: int, generation: int, key: bytes) -> None:
        """Note that a slot was given to a key, whose block will be written."""
        self._keys[slot] = key
        self._generation[slot] = generation
        self._complete[slot] = self._hits[slot] = self.stored[slot] = self.pending[slot] = 0

    def complete(self, slot: int, generation: int) -> bytes | None:
        """Note that the block is whole, and return its key; None if the slot isn't its any more."""
        if not self.holds(slot, generation):
            return None
        self._complete[slot] = 1
        return self._keys[slot]

    def holds(self, slot: int, generation: int) -> bool:
        """Say whether the notes are about this life of the slot."""
        return self._keys[slot] is not None and self._generation[slot] == generation

    def key(self, slot: int, generation: int) -> bytes | None:
        """Return the key that the slot is given to; None if the slot isn't its any more."""
        return self._keys[slot] if self.holds(slot, generation) else None

    def before(self, slot: int, generation: int) -> bytes | None:
        """Return the key of the whole block that the slot held right before, and holds still if nobody wrote to it."""
        if self._complete[slot] and self._generation[slot] == generation - 1:
            return self._keys[slot]
        return None

    def hit(self, slot: int) -> int:
        """Count a use, and return how many there were, up to 255."""
        self._hits[slot] = min(self._hits[slot] + 1, _MAX_HITS)
        return self._hits[slot]

    def hits(self, slot: int) -> int:
        """Return how many uses were counted."""
        return self._hits[slot]

    def clear(self) -> None:
        """Forget everything."""
        self.__init__(len(self._keys))  # type: ignore[misc]
