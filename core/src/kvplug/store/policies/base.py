"""What to evict from a full tier.

A policy orders the slots that may be evicted. It is told of everything that happens to them, and the slots that are
pinned leave its order until they are unpinned, so that choosing a victim never has to skip any: it is O(1), also in a
tier that is full of pinned entries.

To add a policy, derive from `EvictionPolicy` and register the class under the name that the setting uses:

    @register_policy("mru")
    class MRU(EvictionPolicy): ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import TYPE_CHECKING

from kvplug.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LRU", "EvictionPolicy", "SlotQueue", "make_policy", "policy_names", "register_policy"]


class EvictionPolicy(ABC):
    """The order in which published entries are evicted.

    An `Allocator` owns a policy and calls it under its own lock, so a policy needs none. Each method must be O(1)
    (amortised), and what a policy remembers of evicted keys must be bounded. A slot is a *candidate* from `added` or
    `unpinned` until `pinned`, `removed`, or until `victim` returns it.

    Args:
        num_slots: Slots are numbered `0..num_slots - 1`.

    """

    @abstractmethod
    def __init__(self, num_slots: int) -> None: ...

    @abstractmethod
    def added(self, slot: int, key: bytes) -> None:
        """Take in a slot whose entry was published: it is a candidate now."""

    @abstractmethod
    def hit(self, slot: int) -> None:
        """Note that a slot's entry was used. It may be pinned at the time."""

    @abstractmethod
    def pinned(self, slot: int) -> None:
        """Take a candidate out of the order: it must not be evicted."""

    @abstractmethod
    def unpinned(self, slot: int) -> None:
        """Take a slot back into the order after its last pin went."""

    @abstractmethod
    def removed(self, slot: int) -> None:
        """Forget a slot, candidate or pinned, whose entry is gone for another reason than eviction."""

    @abstractmethod
    def victim(self) -> int | None:
        """Choose the candidate to evict, and forget it. None if there is no candidate."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots, and all keys."""


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
        end, last = self._end, self._previous[self._end]
        self._next[last] = self._previous[end] = slot
        self._previous[slot] = last
        self._next[slot] = end
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
        first = self._next[self._end]
        if first == self._end:
            return None
        self.remove(first)
        return first


_policies: dict[str, type[EvictionPolicy]] = {}


def register_policy(name: str) -> Callable[[type[EvictionPolicy]], type[EvictionPolicy]]:
    """Return a class decorator that makes a policy known under `name`.

    Raises:
        ValueError: Another class has that name.

    """

    def register(policy: type[EvictionPolicy]) -> type[EvictionPolicy]:
        if _policies.setdefault(name, policy) is not policy:
            msg = f"eviction policy {name!r} is {_policies[name].__qualname__} already"
            raise ValueError(msg)
        return policy

    return register


def policy_names() -> list[str]:
    """Return the names of all known policies, sorted."""
    return sorted(_policies)


def make_policy(name: str, num_slots: int) -> EvictionPolicy:
    """Return a new policy, by name.

    Raises:
        ConfigError: No policy has that name.

    """
    try:
        policy = _policies[name]
    except KeyError:
        msg = f"There is no eviction policy {name!r}: use one of {', '.join(policy_names())}."
        raise ConfigError(msg) from None
    return policy(num_slots)


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
