"""Eviction policies and their registry."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_models import GhostsModel

from kvplug.errors import ConfigError
from kvplug.store import FIFO, LRU, S3FIFO, Allocator, make_policy, policy_names, register_policy
from kvplug.store.policies import GhostQueue, SlotQueue


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


def test_the_policies_that_settings_name():
    """Settings may say fifo, lru and s3fifo."""
    assert policy_names() == ["fifo", "lru", "s3fifo"]
    assert [type(make_policy(name, 1)) for name in policy_names()] == [FIFO, LRU, S3FIFO]


def _with(policy, num_slots):
    for slot in range(num_slots):
        policy.added(slot, b"key-%d" % slot)
    return policy


def test_fifo_evicts_what_was_stored_first():
    """Uses and pins change nothing of the order; what was pinned when it was next goes as soon as it may."""
    fifo = _with(FIFO(6), 6)
    fifo.hit(0)
    fifo.pinned(0)
    fifo.unpinned(0)
    fifo.pinned(1)
    fifo.pinned(2)
    fifo.removed(3)
    assert [fifo.victim(), fifo.victim()] == [0, 4]
    fifo.unpinned(2)
    fifo.unpinned(1)
    assert [fifo.victim(), fifo.victim(), fifo.victim(), fifo.victim()] == [2, 1, 5, None]


def test_s3fifo_keeps_what_is_used_through_a_scan():
    """Entries that were used stay, while ten times as many as there are slots are stored once each."""
    s3fifo = _with(S3FIFO(20), 20)
    for slot in (3, 7, 11):
        s3fifo.hit(slot)
    for number in range(200):
        s3fifo.added(s3fifo.victim(), b"scan-%d" % number)
    left = [s3fifo.victim() for _ in range(20)]
    assert {3, 7, 11} <= set(left)
    assert s3fifo.victim() is None


def test_s3fifo_knows_what_it_evicted():
    """What is stored again soon after it was evicted outlives what is new; after a clear nobody is known."""
    for clear in (False, True):
        s3fifo = _with(S3FIFO(20), 20)
        slot = s3fifo.victim()
        if clear:
            s3fifo.clear()
            _with(s3fifo, 0)
        s3fifo.added(slot, b"key-%d" % slot)
        others = [other for other in range(20) if other != slot]
        if clear:
            for other in others:
                s3fifo.added(other, b"key-%d" % other)
        order = [s3fifo.victim() for _ in range(20)]
        assert order.index(slot) == (0 if clear else 18)  # the last new one stays in the small queue


def test_s3fifo_keeps_nothing_for_a_pin_without_use():
    """What was pinned when it was next, to be written elsewhere, goes like the rest; what was read meanwhile stays."""
    s3fifo = _with(S3FIFO(20), 20)
    for slot in (0, 1):
        s3fifo.pinned(slot)
    s3fifo.hit(1)
    assert s3fifo.victim() == 2
    for slot in (0, 1):
        s3fifo.unpinned(slot)
    victims = []
    for number in range(30):
        victims.append(s3fifo.victim())
        s3fifo.added(victims[-1], b"scan-%d" % number)
    assert 0 in victims
    assert 1 not in victims


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_ghosts_are_the_last_so_many(capacity):
    """Whatever is added and discarded, what is known is what a list would have, without those whose place is taken."""
    fingerprints = [number << 32 | number % 3 for number in range(-9, 9)]

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.lists(st.tuples(st.booleans(), st.sampled_from(fingerprints)), min_size=20, max_size=200))
    def check(steps):
        ghosts, model = GhostQueue(capacity), GhostsModel(capacity)
        for add, fingerprint in steps:
            if add:
                ghosts.add(fingerprint)
                model.add(fingerprint)
            else:
                assert ghosts.discard(fingerprint) == model.discard(fingerprint)

    check()


def test_most_ghosts_are_remembered_and_none_for_long():
    """Of as many keys as there is room for, few are lost to others in their place; none is known twice as late."""
    ghosts, fingerprints = GhostQueue(10_000), [hash(b"key-%d" % number) for number in range(20_000)]
    for fingerprint in fingerprints:
        ghosts.add(fingerprint)
    assert sum(map(ghosts.discard, fingerprints[10_000:])) > 7_500
    assert not any(map(ghosts.discard, fingerprints))


@pytest.fixture
def pops(monkeypatch):
    """Return the list to which every step of a search for a victim is added.

    A step takes a slot out of a queue, or, in S3-FIFO, asks how often a slot was used, which other calls do, too.
    """
    steps = []
    pop, clear = SlotQueue.pop, S3FIFO.clear

    class Uses(bytearray):
        def __getitem__(self, slot):
            steps.append(slot)
            return super().__getitem__(slot)

    def clear_and_watch(policy):
        clear(policy)
        policy._uses = Uses(policy._uses)

    monkeypatch.setattr(SlotQueue, "pop", lambda queue: steps.append(queue) or pop(queue))
    monkeypatch.setattr(S3FIFO, "clear", clear_and_watch)
    return steps


@pytest.mark.parametrize("name", ["fifo", "lru", "s3fifo"])
def test_i5_a_tier_full_of_pinned_entries_is_not_searched(name, pops):
    """Refusing costs nothing, and however often a victim is looked for, each pin is stepped over once."""
    size = 500
    allocator = Allocator(size, make_policy(name, size))
    keys = [b"%d" % number for number in range(size)]
    allocator.publish(allocator.reserve(keys))
    pinned = allocator.pin_prefix(keys)
    pops.clear()
    for number in range(10):
        assert allocator.reserve([b"new-%d" % number, b"newer"]) == [None, None]
    assert len(pops) <= 20
    assert allocator.refused == 20
    allocator.unpin(pinned[:1])
    for number in range(10):
        allocator.publish(allocator.reserve([b"new-%d" % number]))
    assert allocator.evictions == 10
    assert len(pops) <= 20 + 2 * (size + 10)


@pytest.mark.parametrize("size", [10, 10_000])
def test_s3fifo_evicts_in_few_steps_where_everything_was_used(size, pops):
    """Evictions pass over a few used entries each, and over no more at once than earlier ones have left them."""
    s3fifo = _with(S3FIFO(size), size)
    for slot in range(size):
        for _ in range(3):
            s3fifo.hit(slot)
    pops.clear()
    for evicted in range(1, 6):
        assert s3fifo.victim() is not None
        assert evicted < len(pops) <= 5 * evicted


def test_s3fifo_saves_up_what_evictions_may_pass_over(pops):
    """After a hundred evictions of what wasn't used, one passes over 32 used entries, but not over more."""
    size = 1000
    s3fifo = _with(S3FIFO(size), size)
    for slot in range(100, size):
        s3fifo.hit(slot)
    for slot in range(100):
        assert s3fifo.victim() == slot
    pops.clear()
    assert s3fifo.victim() == 132
    assert 32 < len(pops) <= 36
