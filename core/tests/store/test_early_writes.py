"""Slots that are written to L2 before they are published: nobody else gets them while a tier reads them."""

from __future__ import annotations

import pytest
from tiers import DictTier

from kvplug.stats import Stats
from kvplug.store.directed import DirectedStore
from support.scheduled_steps import scheduled_settings

KEYS = [bytes([number]) * 32 for number in range(16)]


@pytest.fixture
def store():
    """A store of eight slots in two ranks, with one tier."""
    return DirectedStore(scheduled_settings(DictTier), Stats(), num_slots=8, value_bytes=1 << 10, num_ranks=2)


def save(store):
    """Reserve two slots, let them be written after a save, and return them and the command's number."""
    refs = store.reserve(KEYS[:2])
    store.write_after(7, refs)
    (command,) = store.take_commands()
    assert (command.kind, command.after, command.keys) == ("put", 7, tuple(KEYS[:2]))
    return refs, command.number


def taken(store):
    """Return the slots that others can get now."""
    refs = [ref for ref in store.reserve(KEYS[4:]) if ref is not None]
    store.abandon(refs)
    return {ref.slot for ref in refs}


def answer(store, number, *, ranks=1, kept=(True, True)):
    store.answer({number: (ranks, kept)})


def test_published_slots_are_pinned_until_all_ranks_have_written(store):
    """They can be found at once, and evicted when the last rank's tier has ended."""
    refs, number = save(store)
    assert store.publish(refs) == 2
    store.unpin(store.pin_prefix(KEYS[:2]))
    mine = {ref.slot for ref in refs}
    assert taken(store).isdisjoint(mine)
    answer(store, number)
    assert taken(store).isdisjoint(mine)
    answer(store, number)
    assert sum(store.allocator._pins) == 0
    assert len(taken(store)) == 8
    assert store.take_commands() == (), "written once"


def test_written_before_they_are_published(store):
    """A tier may be faster than the report that all ranks have saved: then nothing is pinned, or written again."""
    refs, number = save(store)
    answer(store, number, ranks=2)
    assert store.publish(refs) == 2
    assert sum(store.allocator._pins) == 0
    assert store.take_commands() == ()


@pytest.mark.parametrize("kept", [(True, True), (False, False)])
def test_a_save_that_failed_in_one_rank(store, kept):
    """The other rank's tier may still read its slots: they are given back when that has ended, and not before."""
    refs, number = save(store)
    mine = {ref.slot for ref in refs}
    answer(store, number, kept=(False, False))
    store.abandon(refs)
    assert taken(store).isdisjoint(mine)
    answer(store, number, kept=kept)
    assert len(taken(store)) == 8
    assert sum(store.allocator._pins) == 0


def test_a_reset_in_between(store):
    """After a reset nobody finds them; they are given back when the tier has ended, since it has their old names."""
    refs, number = save(store)
    mine = {ref.slot for ref in refs}
    store.clear()
    assert store.publish(refs) == 0
    assert taken(store).isdisjoint(mine)
    answer(store, number, ranks=2)
    assert len(taken(store)) == 8
    assert sum(store.allocator._pins) == 0
    assert store.pin_prefix(KEYS[:2]) == []


def test_what_finds_no_room_is_written_when_it_is_published():
    """The limit of what may be on its way holds for early writes, too; the rest comes later, and isn't dropped."""
    stats = Stats()
    settings = scheduled_settings(DictTier, l2_write_inflight_per_rank=1 << 10)
    store = DirectedStore(settings, stats, num_slots=8, value_bytes=1 << 10, num_ranks=1)
    refs = store.reserve(KEYS[:2])
    store.write_after(7, refs)
    (first,) = store.take_commands()
    assert first.keys == (KEYS[0],)
    answer(store, first.number, kept=(True,))
    store.publish(refs)
    (second,) = store.take_commands()
    assert (second.keys, second.after) == ((KEYS[1],), None)
    assert "l2_writes_dropped:dict" not in stats.totals()
