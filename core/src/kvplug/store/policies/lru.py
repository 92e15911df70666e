"""Least recently used."""

from __future__ import annotations

from kvplug.store.policies.base import EvictionPolicy, register_policy
from kvplug.store.policies.slot_queue import SlotQueue

__all__ = ["LRU"]


@register_policy("lru")
class LRU(EvictionPolicy):
    """Evict what was used longest ago. To be unpinned counts as use: a pin is a read that just ended."""

    def __init__(self, num_slots: int) -> None:
        self._queue = SlotQueue(num_slots)

    def added(self, slot: int, key: bytes) -> None:  # noqa: ARG002  # identity matters to policies with ghosts only
        """Queue the slot as the most recently used one."""
        self._queue.append(slot)

    def hit(self, slot: int) -> None:
        """Make a candidate the most recently used one; a pinned slot becomes that when it is unpinned."""
        if slot in self._queue:
            self._queue.remove(slot)
            self._queue.append(slot)

    def pinned(self, slot: int) -> None:
        """Take the slot out of the queue."""
        self._queue.remove(slot)

    def unpinned(self, slot: int) -> None:
        """Queue the slot as the most recently used one."""
        self._queue.append(slot)

    def removed(self, slot: int) -> None:
        """Take the slot out of the queue, if it is in it."""
        if slot in self._queue:
            self._queue.remove(slot)

    def victim(self) -> int | None:
        """Take out the least recently used candidate."""
        return self._queue.pop()

    def clear(self) -> None:
        """Empty the queue."""
        self._queue.clear()
