"""The interface of eviction policies, and the names that they go by.

A policy orders the slots that may be evicted, and is told of everything that happens to them. It knows which are
pinned, so that a tier full of pinned entries isn't searched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvplug.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EvictionPolicy", "make_policy", "policy_names", "register_policy"]


class EvictionPolicy(ABC):
    """The order in which published entries are evicted.

    An `Allocator` owns a policy and calls it under its own lock, so a policy needs none. A slot is a *candidate* from
    `added` or `unpinned` until `pinned`, `removed`, or until `victim` returns it.

    Each method must be O(1) however many slots there are, also `victim` where there is no candidate. Its search may
    step over pinned slots, if it steps over each pin, and each use of a pinned slot, at most once. What a policy
    remembers of evicted keys must be bounded.

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
        """Note that a slot's entry was used. It may be pinned at the time. Nothing else counts as use."""

    @abstractmethod
    def pinned(self, slot: int) -> None:
        """Take note that a candidate must not be evicted. That isn't use: the store pins what it writes to L2, too."""

    @abstractmethod
    def unpinned(self, slot: int) -> None:
        """Take note that a slot's last pin went: it is a candidate again."""

    @abstractmethod
    def removed(self, slot: int) -> None:
        """Forget a slot, candidate or pinned, whose entry is gone for another reason than eviction."""

    @abstractmethod
    def victim(self) -> int | None:
        """Choose the candidate to evict, and forget it. None if there is no candidate."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots, and all keys."""


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
