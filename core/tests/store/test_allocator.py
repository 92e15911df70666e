"""The allocator: index, pins, eviction."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from array import array

import pytest

from kvplug.store import LRU, Allocator, SlotRef, make_policy, policy_names


def _keys(*numbers):
    return [b"key-%d" % number for number in numbers]


def _fill(allocator, *numbers):
    refs = allocator.reserve(_keys(*numbers))
    assert allocator.publish(refs) == len(numbers)
    return refs


def test_b5_a_pinned_hit_survives_eviction_pressure():
    """Blocks found by a lookup stay where they are, however much is stored before they are read."""
    allocator = Allocator(4)
    _fill(allocator, 0, 1, 2)
    hits = allocator.pin_prefix(_keys(0, 1))
    for number in range(100, 200):
        _fill(allocator, number)
    assert allocator.pin_prefix(_keys(0, 1)) == hits
    allocator.unpin(hits)
    allocator.unpin(hits)
    for number in range(200, 204):
        _fill(allocator, number)
    assert allocator.prefix_length(_keys(0)) == 0


def test_c13_a_full_tier_refuses_cleanly():
    """A tier with nothing to evict refuses each key by itself: the answer has one item per key, and the rest works."""
    allocator = Allocator(4)
    _fill(allocator, 0, 1)
    pinned = allocator.pin_prefix(_keys(0, 1))
    refs = allocator.reserve(_keys(0, 5, 6, 7, 8))
    assert [ref is not None for ref in refs] == [False, True, True, False, False]
    assert allocator.refused == 2
    allocator.publish(refs[1:3])
    allocator.unpin(pinned)
    assert allocator.prefix_length(_keys(5, 6)) == 2
    assert allocator.reserve(_keys(7))[0] is not None


class _CountedArray(array):
    """An array that counts how often it is read or written."""

    accesses = 0

    def __getitem__(self, item):
        _CountedArray.accesses += 1
        return super().__getitem__(item)

    def __setitem__(self, item, value):
        _CountedArray.accesses += 1
        super().__setitem__(item, value)


@pytest.mark.parametrize("size", [10, 10_000])
def test_refusal_and_eviction_cost_the_same_in_any_tier(size):
    """Refusing in a tier full of pinned entries, and evicting the only other one, take a constant number of steps."""
    policy = LRU(size)
    allocator = Allocator(size, policy)
    _fill(allocator, *range(size))
    pinned = allocator.pin_prefix(_keys(*range(size)))
    policy._queue._next = _CountedArray("i", policy._queue._next)
    policy._queue._previous = _CountedArray("i", policy._queue._previous)
    _CountedArray.accesses = 0
    assert allocator.reserve(_keys(-1)) == [None]
    assert _CountedArray.accesses <= 2
    allocator.unpin(pinned[-1:])
    _CountedArray.accesses = 0
    assert allocator.reserve(_keys(-1))[0].slot == pinned[-1].slot
    assert _CountedArray.accesses <= 10
    assert (allocator.evictions, allocator.refused) == (1, 1)


class _RecordingPolicy(LRU):
    """Writes down what it is told."""

    def __init__(self, num_slots):
        super().__init__(num_slots)
        self.log = []
        for name in ("added", "hit", "pinned", "unpinned", "removed", "victim", "clear"):
            setattr(self, name, self._recorded(name, getattr(self, name)))

    def _recorded(self, name, method):
        return lambda *args: self.log.append(name) or method(*args)


def test_a_policy_is_told_of_everything():
    """A policy hears of each publication, use, first and last pin, removal and clear, whatever it makes of them."""
    policy = _RecordingPolicy(1)
    allocator = Allocator(1, policy)

    def told(call, *args):
        policy.log.clear()
        return call(*args), policy.log

    refs, log = told(allocator.reserve, _keys(0))
    assert log == []
    assert told(allocator.publish, refs)[1] == ["added"]
    assert told(allocator.prefix_length, _keys(0))[1] == []
    pins, log = told(allocator.pin_prefix, _keys(0))
    assert log == ["pinned", "hit"]
    assert told(allocator.pin_prefix, _keys(0))[1] == ["hit"]
    assert told(lambda: allocator.pin_prefix(_keys(0), used=False))[1] == []
    assert told(allocator.unpin, pins)[1] == []
    assert told(allocator.unpin, pins)[1] == []
    assert told(allocator.unpin, pins)[1] == ["unpinned"]
    refs, log = told(allocator.reserve, _keys(1))
    assert log == ["victim"]
    assert told(allocator.reserve, _keys(2))[1] == ["victim"]
    assert told(allocator.publish, refs)[1] == ["added"]
    assert told(allocator.discard, _keys(1))[1] == ["removed"]
    assert told(allocator.clear)[1] == ["clear"]


def test_the_tail_of_a_prefix_goes_before_its_head():
    """Within a batch, the last key is evicted first: a prefix without its head is worth nothing."""
    allocator = Allocator(4)
    _fill(allocator, 0, 1, 2, 3)
    _fill(allocator, 10)
    assert allocator.prefix_length(_keys(0, 1, 2, 3)) == 3
    allocator.unpin(allocator.pin_prefix(_keys(0, 1, 2)))
    _fill(allocator, 11, 12)
    assert allocator.prefix_length(_keys(0, 1, 2)) == 2


def _order_of_eviction(allocator):
    """Store one new key after the other, and return which of the first ones went, in order."""
    there = [number for number in range(8) if allocator.prefix_length(_keys(number))]
    gone = []
    for number in range(1000, 1000 + len(there)):
        _fill(allocator, number)
        gone += [one for one in there if one not in gone and not allocator.prefix_length(_keys(one))]
    return gone


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("used", [False, True])
def test_a_pin_without_use_changes_nothing_of_the_order(policy, used):
    """What is pinned only, for short or for long, over others' uses or under them, goes when it would have gone.

    The pins that count as use are the control: there, policies that know of use choose others.
    """

    def order(*, pin):
        allocator = Allocator(8, make_policy(policy, 8))
        _fill(allocator, *range(8))
        allocator.unpin(allocator.pin_prefix(_keys(7)))
        if pin:
            allocator.unpin(allocator.pin_prefix(_keys(5, 6), used=used))
            held = allocator.pin_prefix(_keys(3, 4), used=used)
            allocator.unpin(allocator.pin_prefix(_keys(0)))
            allocator.unpin(held)
        else:
            allocator.unpin(allocator.pin_prefix(_keys(0)))
        return _order_of_eviction(allocator)

    counts = used and policy != "fifo"
    assert (order(pin=True) == order(pin=False)) == (not counts)


def test_lru_what_was_pinned_when_it_was_next_goes_first():
    """LRU steps over a pinned entry, and it goes as soon as it may; used meanwhile, it is the last to go."""
    for use in (False, True):
        allocator = Allocator(4)
        for number in range(4):
            _fill(allocator, number)
        held = allocator.pin_prefix(_keys(0), used=False)
        _fill(allocator, 4, 5)  # steps over 0; 1 and 2 go
        if use:
            allocator.touch_prefix(_keys(0))
        allocator.unpin(held)
        _fill(allocator, 6)
        gone = [number for number in range(7) if not allocator.prefix_length(_keys(number))]
        assert gone == ([1, 2, 3] if use else [0, 1, 2])


def test_what_is_saved_again_counts_as_used():
    """A batch renews those of its blocks that are there already, also if nobody has looked them up."""
    allocator = Allocator(4)
    _fill(allocator, 0, 1, 2)
    _fill(allocator, 9)
    _fill(allocator, 3)
    assert allocator.prefix_length(_keys(0, 1, 2)) == 2
    refs = allocator.reserve(_keys(0, 1))
    assert refs == [None, None]
    _fill(allocator, 10, 11)
    assert allocator.prefix_length(_keys(0, 1)) == 2


def test_a_batch_does_not_evict_its_own_blocks():
    """Neither what a batch names and is there, nor what was reserved for it, makes room for the rest of it."""
    allocator = Allocator(3)
    _fill(allocator, 0)
    _fill(allocator, 9)
    refs = allocator.reserve(_keys(0, 1, 2, 3))
    assert [ref is not None for ref in refs] == [False, True, True, False]
    assert allocator.prefix_length(_keys(0)) == 1
    assert allocator.prefix_length(_keys(9)) == 0


def test_keys_that_are_there_or_being_written_get_no_slot():
    """One writer per key: duplicates, keys being written and published ones get None, and aren't counted as refused."""
    allocator = Allocator(8)
    first = allocator.reserve(_keys(1, 1))
    assert first[0] is not None
    assert first[1] is None
    assert allocator.reserve(_keys(1)) == [None]
    assert allocator.prefix_length(_keys(1)) == 0
    assert allocator.pin_prefix(_keys(1)) == []
    allocator.publish(first[:1])
    assert allocator.reserve(_keys(1)) == [None]
    assert allocator.refused == 0


def test_lookup_changes_nothing():
    """Asking for the length of a prefix doesn't renew it."""
    allocator = Allocator(2)
    _fill(allocator, 0)
    _fill(allocator, 1)
    assert allocator.prefix_length(_keys(0, 1, 2)) == 2
    _fill(allocator, 2)
    assert allocator.prefix_length(_keys(0)) == 0


def test_a_slot_reserved_before_a_clear_never_becomes_visible():
    """After a clear nothing of before can be found, neither pinned nor published late; the slots come back."""
    allocator = Allocator(3)
    _fill(allocator, 0)
    pinned = allocator.pin_prefix(_keys(0))
    writing = allocator.reserve(_keys(1, 2))
    assert allocator.clear() is False
    assert allocator.prefix_length(_keys(0)) == allocator.prefix_length(_keys(1)) == 0
    assert allocator.used == 3
    # Nothing can be had until holders let go, and nothing of before can be evicted.
    assert allocator.reserve(_keys(1)) == [None]
    assert allocator.publish(writing[:1]) == 0
    again = allocator.reserve(_keys(1))
    assert again[0].slot == writing[0].slot
    assert allocator.publish(writing[:1]) == 0  # late, and by the previous owner
    assert allocator.prefix_length(_keys(1)) == 0
    assert allocator.publish(again) == 1
    allocator.abandon(writing[1:])
    allocator.unpin(pinned)
    assert allocator.used == 1
    assert allocator.clear() is True
    assert allocator.used == 0


def test_discarded_keys_are_gone_at_once():
    """A discarded key can't be found and can be stored anew, while its old slot stays with whoever holds it."""
    allocator = Allocator(4)
    _fill(allocator, 0, 1)
    pinned = allocator.pin_prefix(_keys(0))
    writing = allocator.reserve(_keys(2))
    allocator.discard(_keys(0, 1, 2, 3))
    assert [allocator.prefix_length(_keys(number)) for number in range(3)] == [0, 0, 0]
    assert allocator.used == 2
    anew = allocator.reserve(_keys(0))
    assert anew[0].slot != pinned[0].slot
    allocator.publish(anew)
    assert allocator.publish(writing) == 0
    allocator.unpin(pinned)
    assert allocator.used == 1
    assert allocator.prefix_length(_keys(0)) == 1


def test_stale_references_do_nothing():
    """Whoever comes late can't publish, abandon or unpin what belongs to the slot's next owner."""
    allocator = Allocator(1)
    old = allocator.reserve(_keys(0))
    allocator.abandon(old)
    new = allocator.reserve(_keys(1))
    assert new[0].slot == old[0].slot
    assert allocator.publish(old) == 0
    allocator.abandon(old)
    allocator.publish(new)
    pin = allocator.pin_prefix(_keys(1))
    allocator.unpin(old)
    assert allocator.stale == 3
    assert allocator.reserve(_keys(2)) == [None]
    allocator.unpin(pin)
    assert allocator.reserve(_keys(2))[0] is not None


def test_misuse_is_an_error_and_changes_nothing():
    """Giving back twice, by the wrong call, or what was never handed out is refused before anything happens."""
    allocator = Allocator(4)
    published = _fill(allocator, 0, 1)
    writing = allocator.reserve(_keys(2))
    pinned = allocator.pin_prefix(_keys(0))
    for call, refs, message in [
        (allocator.publish, writing + published, "isn't reserved"),
        (allocator.abandon, writing + published, "isn't reserved"),
        (allocator.publish, writing * 2, "comes twice"),
        (allocator.unpin, pinned * 2, "more often than it was pinned"),
        (allocator.unpin, pinned + published[1:], "more often than it was pinned"),
        (allocator.unpin, writing, "more often than it was pinned"),
        (allocator.unpin, [SlotRef(4, 0)], "never handed out"),
        (allocator.publish, [SlotRef(0, 1)], "never handed out"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(refs)
    assert allocator.used == 3
    assert allocator.publish(writing) == 1
    allocator.unpin(pinned)
    with pytest.raises(ValueError, match="more often than it was pinned"):
        allocator.unpin(pinned)
    with pytest.raises(ValueError, match="at least one slot"):
        Allocator(0)


def test_references_travel_between_processes():
    """A scheduler may send references to workers and take them back."""
    allocator = Allocator(2)
    refs = pickle.loads(pickle.dumps(allocator.reserve(_keys(0))))
    assert allocator.publish(refs) == 1


def test_threads_never_share_a_slot():
    """Under many threads no slot has two owners at a time, and all slots come back."""
    allocator = Allocator(16)
    owners = [0] * 16
    problems = []
    start = threading.Barrier(4)

    def work(seed):
        rng = random.Random(seed)
        start.wait()
        for _ in range(3000):
            keys = _keys(*(rng.randrange(40) for _ in range(4)))
            refs = [ref for ref in allocator.reserve(keys) if ref is not None]
            for ref in refs:
                owners[ref.slot] += 1
            if any(owners[ref.slot] != 1 for ref in refs):
                problems.append("a slot has two writers")
            for ref in refs:
                owners[ref.slot] -= 1
            (allocator.publish if rng.random() < 0.8 else allocator.abandon)(refs)
            hits = allocator.pin_prefix(keys)
            if any(owners[ref.slot] for ref in hits):
                problems.append("a pinned slot is being written")
            allocator.unpin(hits)
            if rng.random() < 0.01:
                allocator.clear()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not problems
    assert allocator.stale == 0
    assert allocator.clear() is True
