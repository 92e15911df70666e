"""Least recently used."""

from __future__ import annotations

from kvplug.store.policies.base import register_policy
from kvplug.store.policies.fifo import FIFO

__all__ = ["LRU"]


@register_policy("lru")
class LRU(FIFO):
    """Evict what was used longest ago: first in, first out, where to be used is to come in again.

    So a pin alone changes nothing of the order, however long it lasts, and neither does its end: what counts is when
    the use began. A pinned slot that is next is put aside, and evicted first once it is unpinned, unless it is used
    before.
    """

    def hit(self, slot: int) -> None:
        """Make the slot the most recently used one, pinned or not, and put aside or not."""
        if slot in self._queue:
            self._queue.remove(slot)
        elif slot in self._overdue:
            self._overdue.remove(slot)
        self._queue.append(slot)
