"""The allocator with each policy, against a plain model, in long runs: errors hide in tiers that were full for long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_models import POLICY_MODELS

from kvplug.store import Allocator, make_policy, policy_names

KEYS = [b"%d" % number for number in range(12)]


class Entry:
    """What a slot holds: it can be found while its key is there and it was written."""

    def __init__(self, key):
        self.key = key
        self.ref = None
        self.findable = True
        self.written = False
        self.pins = 0
        self.uses = 0


class Model:
    """What an allocator is meant to do."""

    def __init__(self, capacity, policy):
        self.capacity = capacity
        self.policy = policy
        self.entries = []

    def find(self, key):
        return next((entry for entry in self.entries if entry.key == key and entry.findable), None)

    def prefix(self, keys):
        found = []
        for key in keys:
            entry = self.find(key)
            if entry is None or not entry.written:
                break
            found.append(entry)
        return found

    def pin(self, entry):
        entry.pins += 1
        if entry.pins == 1:
            self.policy.pinned(entry)

    def unpin(self, entry):
        entry.pins -= 1
        if entry.pins:
            return
        if entry.findable:
            self.policy.unpinned(entry)
        else:
            self.entries.remove(entry)

    def reserve(self, keys):
        """Return for each key its new entry, or None; and how many found no room."""
        present = [entry for entry in map(self.find, keys) if entry is not None and entry.written]
        for entry in reversed(present):
            self.pin(entry)
            self.policy.hit(entry)
        got, refused = [], 0
        for key in keys:
            entry = None
            if self.find(key) is None:
                if len(self.entries) == self.capacity and (victim := self.policy.victim()) is not None:
                    self.entries.remove(victim)
                if len(self.entries) < self.capacity:
                    entry = Entry(key)
                    self.entries.append(entry)
                else:
                    refused += 1
            got.append(entry)
        for entry in present:
            self.unpin(entry)
        return got, refused

    def publish(self, entries):
        for entry in reversed(entries):
            if entry.findable:
                entry.written = True
                self.policy.added(entry)
            else:
                self.entries.remove(entry)

    def lose(self, entry):
        """Make an entry impossible to find; its slot is free once nobody holds it."""
        entry.findable = False
        if entry.written and not entry.pins:
            self.entries.remove(entry)


class Runner:
    """Calls both with the same arguments and compares the answers."""

    def __init__(self, policy, capacity, rng):
        self.rng = rng
        self.allocator = Allocator(capacity, make_policy(policy, capacity))
        self.model = Model(capacity, POLICY_MODELS[policy](capacity))
        self.writing, self.held, self.gone = [], [], []
        self.refused = self.stale = 0

    def keys(self):
        return [self.rng.choice(KEYS) for _ in range(self.rng.randint(1, 5))]

    def some(self, items):
        """Take some of the items out, and return them."""
        chosen = self.rng.sample(range(len(items)), self.rng.randint(min(1, len(items)), min(6, len(items))))
        taken = [items[place] for place in chosen]
        items[:] = [item for place, item in enumerate(items) if place not in chosen]
        return taken

    def reserve(self):
        keys = self.keys()
        refs = self.allocator.reserve(keys)
        entries, refused = self.model.reserve(keys)
        self.refused += refused
        assert [ref is not None for ref in refs] == [entry is not None for entry in entries]
        for ref, entry in zip(refs, entries, strict=True):
            if entry is not None:
                entry.ref = ref
        new = [entry for entry in entries if entry is not None]
        self.writing += new
        return new

    def publish(self, entries=None):
        entries = self.some(self.writing) if entries is None else entries
        self.gone += [entry.ref for entry in entries if not entry.findable]
        found = sum(entry.findable for entry in entries)
        assert self.allocator.publish([entry.ref for entry in entries]) == found
        self.model.publish(entries)

    def store(self):
        entries = self.reserve()
        self.writing = [entry for entry in self.writing if entry not in entries]
        self.publish(entries)

    def abandon(self):
        entries = self.some(self.writing)
        self.gone += [entry.ref for entry in entries]
        self.allocator.abandon([entry.ref for entry in entries])
        self.model.entries = [entry for entry in self.model.entries if entry not in entries]

    def pin(self):
        keys = self.keys()
        hits = self.model.prefix(keys)
        used = self.rng.random() < 0.6
        assert self.allocator.pin_prefix(keys, used=used) == [entry.ref for entry in hits]
        for entry in hits:
            self.model.pin(entry)
        for entry in reversed(hits if used else []):
            self.model.policy.hit(entry)
        self.held += hits

    def unpin(self):
        entries = self.some(self.held)
        self.allocator.unpin([entry.ref for entry in entries])
        for entry in reversed(entries):
            self.model.unpin(entry)
        self.gone += {entry.ref for entry in entries if not (entry.findable or entry.pins)}

    def touch(self):
        keys = self.keys()
        hits = self.model.prefix(keys)
        assert self.allocator.touch_prefix(keys) == len(hits)
        for entry in reversed(hits):
            self.model.policy.hit(entry)

    def look_up(self):
        keys = self.keys()
        assert self.allocator.prefix_length(keys) == len(self.model.prefix(keys))

    def discard(self):
        keys = self.keys()[:2]
        self.allocator.discard(keys)
        for key in keys:
            entry = self.model.find(key)
            if entry is not None:
                if entry.written:
                    self.model.policy.removed(entry)
                self.model.lose(entry)

    def clear(self):
        self.model.policy.clear()
        for entry in [entry for entry in self.model.entries if entry.findable]:
            self.model.lose(entry)
        assert self.allocator.clear() == (not self.model.entries)

    def come_late(self):
        if self.gone:
            late = self.rng.choice([self.allocator.publish, self.allocator.abandon, self.allocator.unpin])
            late([self.rng.choice(self.gone)])
            self.stale += 1

    def run(self, steps):
        often = [self.store, self.store, self.reserve, self.publish, self.publish, self.pin, self.unpin, self.unpin]
        often += [self.touch, self.look_up, self.abandon, self.come_late]
        for _ in range(steps):
            rare = self.rng.random()
            operation = self.clear if rare < 0.003 else self.discard if rare < 0.03 else self.rng.choice(often)
            operation()
            self.compare()

    def compare(self):
        assert self.allocator.used == len(self.model.entries)
        assert self.allocator.refused == self.refused
        assert self.allocator.stale == self.stale
        for key in KEYS:
            assert self.allocator.prefix_length([key]) == len(self.model.prefix([key]))
        slots = [entry.ref.slot for entry in self.model.entries]
        assert len(set(slots)) == len(slots)


@pytest.mark.parametrize("policy", policy_names())
def test_agrees_with_a_plain_model(policy):
    """Whatever is called in whatever order, every answer and every eviction is that of the model."""

    @settings(max_examples=12, deadline=None, database=None)
    @given(capacity=st.sampled_from([1, 2, 3, 5, 8, 11]), rng=st.randoms(use_true_random=True))
    def check(capacity, rng):
        Runner(policy, capacity, rng).run(600)

    check()
