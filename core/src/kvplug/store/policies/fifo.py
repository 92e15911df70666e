"""First in, first out."""

from __future__ import annotations

from kvplug.store.policies.base import EvictionPolicy, register_policy
from kvplug.store.policies.slot_queue import SlotQueue

__all__ = ["FIFO"]


@register_policy("fifo")
class FIFO(EvictionPolicy):
    """Evict what was stored first, used or not.

    A pinned slot keeps its place. If it is next, it is put aside, and evicted first once it is unpinned: there is
    nothing older.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.clear()

    def added(self, slot: int, key: bytes) -> None:  # noqa: ARG002 - identity matters to policies with ghosts only
        """Queue the slot."""
        self._queue.append(slot)
        self._candidates += 1

    def hit(self, slot: int) -> None:
        """Do nothing: to be used saves nobody."""

    def pinned(self, slot: int) -> None:
        """Remember that the slot is pinned."""
        self._pinned[slot] = 1
        self._candidates -= 1

    def unpinned(self, slot: int) -> None:
        """Forget that the slot was pinned; if it was put aside, it is next."""
        self._pinned[slot] = 0
        self._candidates += 1
        if slot not in self._queue and slot not in self._overdue:
            self._overdue.append(slot)

    def removed(self, slot: int) -> None:
        """Take the slot out of the queue, if it is in it."""
        for queue in (self._queue, self._overdue):
            if slot in queue:
                queue.remove(slot)
        if self._pinned[slot]:
            self._pinned[slot] = 0
        else:
            self._candidates -= 1

    def victim(self) -> int | None:
        """Take out the oldest candidate."""
        if not self._candidates:
            return None
        while True:
            slot = self._overdue.pop()
            if slot is None:
                slot = self._queue.pop()
            assert slot is not None
            if not self._pinned[slot]:
                self._candidates -= 1
                return slot

    def clear(self) -> None:
        """Empty the queue."""
        self._queue = SlotQueue(self._num_slots)
        # Slots that were pinned when they were next. They are older than all in the queue.
        self._overdue = SlotQueue(self._num_slots)
        self._pinned = bytearray(self._num_slots)
        self._candidates = 0
