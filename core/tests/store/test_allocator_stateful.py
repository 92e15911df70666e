"""The allocator against a plain model, at random."""

from __future__ import annotations

import random

import pytest

from kvplug.store import Allocator


class _Model:
    """What an allocator is meant to do, in the plainest way: lists, searched from end to end."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.order = []  # keys that are published and unpinned, next victim first
        self.pins = {}  # published key: number of pins
        self.reserved = set()
        self.orphans = 0  # slots that can't be found, but are held

    @property
    def used(self):
        return len(self.pins) + len(self.reserved) + self.orphans

    def prefix(self, keys):
        return next((i for i, key in enumerate(keys) if key not in self.pins), len(keys))

    def pin(self, keys):
        keys = keys[: self.prefix(keys)]
        for key in keys:
            if key in self.order:
                self.order.remove(key)
            self.pins[key] += 1
        return keys

    def unpin(self, keys):
        for key in reversed(keys):
            self.pins[key] -= 1
            if not self.pins[key]:
                self.order.append(key)

    def reserve(self, keys):
        present = self.keep([key for key in keys if key in self.pins])
        got = []
        for key in keys:
            if key in self.pins or key in self.reserved:
                continue
            if self.used == self.capacity:
                if not self.order:
                    continue
                del self.pins[self.order.pop(0)]
            self.reserved.add(key)
            got.append(key)
        self.unpin(present)
        return got

    def keep(self, keys):
        for key in keys:
            self.pin([key])
        return keys

    def publish(self, keys):
        for key in reversed(keys):
            self.reserved.remove(key)
            self.pins[key] = 0
            self.order.append(key)


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_a_plain_model(seed):
    """Thousands of random operations, with clears and discards between them: every answer is that of the model."""
    rng = random.Random(seed)
    capacity = rng.choice([1, 2, 5, 16])
    allocator, model = Allocator(capacity), _Model(capacity)
    held, writing, lost_pins, lost_writes = [], [], [], []
    owner = {}  # slot: who was promised that it stays (a token per reservation or pinned key)
    for _ in range(2500):
        keys = [b"%d" % rng.randrange(3 * capacity) for _ in range(rng.randrange(5))]
        operation = rng.choice("pplrrruuwwwaadcLLMM")
        if operation == "p":
            refs, hits = allocator.pin_prefix(keys), model.pin(keys)
            assert len(refs) == len(hits)
            for ref, key in zip(refs, hits, strict=True):
                assert owner.setdefault(ref.slot, key) == key
            if refs:
                held.append((refs, hits))
        elif operation == "l":
            assert allocator.prefix_length(keys) == model.prefix(keys)
        elif operation == "r":
            refs = allocator.reserve(keys)
            got = model.reserve(keys)
            assert [key for key, ref in zip(keys, refs, strict=True) if ref is not None] == got
            refs = [ref for ref in refs if ref is not None]
            pinned_slots = {ref.slot for batch, _ in held + writing + lost_pins + lost_writes for ref in batch}
            assert not pinned_slots & {ref.slot for ref in refs}
            for ref, key in zip(refs, got, strict=True):
                owner[ref.slot] = key
            if refs:
                writing.append((refs, got))
        elif operation == "u" and held:
            refs, keys = held.pop(rng.randrange(len(held)))
            allocator.unpin(refs)
            model.unpin(keys)
        elif operation == "w" and writing:
            refs, keys = writing.pop(rng.randrange(len(writing)))
            assert allocator.publish(refs) == len(keys)
            model.publish(keys)
        elif operation == "a" and writing:
            refs, keys = writing.pop(rng.randrange(len(writing)))
            allocator.abandon(refs)
            model.reserved -= set(keys)
        elif operation == "c" and rng.random() < 0.1:
            lost_pins += held
            lost_writes += writing
            model.orphans += len(model.reserved) + sum(1 for pins in model.pins.values() if pins)
            model.order, model.pins, model.reserved, held, writing = [], {}, set(), [], []
            assert allocator.clear() == (model.orphans == 0)
        elif operation == "d" and not held and not writing and keys:
            allocator.discard(keys)
            for key in set(keys) & set(model.order):
                model.order.remove(key)
                del model.pins[key]
        elif operation == "L" and lost_pins:
            allocator.unpin(lost_pins.pop()[0])
        elif operation == "M" and lost_writes:
            refs = lost_writes.pop()[0]
            if rng.random() < 0.5:
                assert allocator.publish(refs) == 0
            else:
                allocator.abandon(refs)
        model.orphans = len({ref.slot for refs, _ in lost_pins + lost_writes for ref in refs})
        assert allocator.used == model.used
    assert allocator.stale == 0
