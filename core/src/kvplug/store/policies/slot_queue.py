"""A queue of slots, from which any can be taken out at once."""

from __future__ import annotations

from array import array

__all__ = ["SlotQueue"]


class SlotQueue:
    """A queue of slots from which any can be taken out in O(1): a doubly linked list in two arrays.

    8 bytes per slot of the tier, however many are queued; building block for policies.

    Args:
        num_slots: Slots are numbered `0..num_slots - 1`.

    """

    __slots__ = ("_end", "_length", "_next", "_previous")

    _ABSENT = -1

    def __init__(self, num_slots: int) -> None:
        # One more than there are slots: the list's two ends meet in it.
        self._end = num_slots
        self.clear()

    def clear(self) -> None:
        """Take out all slots."""
        self._next = array("i", [self._ABSENT]) * (self._end + 1)
        self._previous = array("i", self._next)
        self._next[self._end] = self._previous[self._end] = self._end
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, slot: int) -> bool:
        return self._next[slot] != self._ABSENT

    def append(self, slot: int) -> None:
        """Put a slot that isn't in the queue at its end."""
        following, previous, end = self._next, self._previous, self._end
        last = previous[end]
        following[last] = previous[end] = slot
        previous[slot] = last
        following[slot] = end
        self._length += 1

    def remove(self, slot: int) -> None:
        """Take out a slot that is in the queue, wherever it stands."""
        following, previous = self._next[slot], self._previous[slot]
        self._next[previous] = following
        self._previous[following] = previous
        self._next[slot] = self._ABSENT
        self._length -= 1

    def pop(self) -> int | None:
        """Take out the first slot. None if the queue is empty."""
        following, previous, end = self._next, self._previous, self._end
        first = following[end]
        if first == end:
            return None
        second = following[end] = following[first]
        previous[second] = end
        following[first] = self._ABSENT
        self._length -= 1
        return first
