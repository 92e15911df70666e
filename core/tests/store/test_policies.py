"""Eviction policies and their registry."""

from __future__ import annotations

import random

import pytest

from kvplug.errors import ConfigError
from kvplug.store import LRU, make_policy, policy_names, register_policy
from kvplug.store.policies import SlotQueue


@pytest.mark.parametrize("seed", range(5))
def test_slot_queue_is_a_queue(seed):
    """Appending, removing anywhere, popping and clearing agree with a plain list."""
    rng = random.Random(seed)
    queue, model = SlotQueue(20), []
    for _ in range(3000):
        slot = rng.randrange(20)
        match rng.randrange(8):
            case 0 | 1 | 2 if slot not in model:
                queue.append(slot)
                model.append(slot)
            case 3 | 4 if slot in model:
                queue.remove(slot)
                model.remove(slot)
            case 5 | 6:
                assert queue.pop() == (model.pop(0) if model else None)
            case 7 if rng.random() < 0.02:
                queue.clear()
                model.clear()
        assert len(queue) == len(model)
        assert (slot in queue) == (slot in model)
    while model:
        assert queue.pop() == model.pop(0)
    assert queue.pop() is None


def test_lru_evicts_what_was_used_longest_ago():
    """Hits and unpins renew; pinned and removed slots are no victims."""
    lru = LRU(6)
    for slot in range(6):
        lru.added(slot, b"key")
    lru.hit(0)
    lru.pinned(1)
    lru.hit(1)
    lru.removed(2)
    lru.pinned(3)
    lru.removed(3)
    assert [lru.victim(), lru.victim()] == [4, 5]
    lru.unpinned(1)
    assert [lru.victim(), lru.victim(), lru.victim()] == [0, 1, None]
    lru.added(2, b"key")
    lru.clear()
    assert lru.victim() is None


def test_policies_are_chosen_by_name(monkeypatch):
    """A registered class is found by its name; an unknown name lists the known ones; a name belongs to one class."""
    monkeypatch.setattr("kvplug.store.policies.base._policies", {"lru": LRU})
    assert isinstance(make_policy("lru", 3), LRU)

    @register_policy("mru")
    class MRU(LRU):
        pass

    assert policy_names() == ["lru", "mru"]
    assert type(make_policy("mru", 3)) is MRU
    with pytest.raises(ConfigError, match=r"no eviction policy 'lfu': use one of lru, mru\."):
        make_policy("lfu", 3)
    with pytest.raises(ValueError, match="is LRU already"):
        register_policy("lru")(MRU)
