"""Several KV-cache groups: what a step offers and saves, and how far what is there leads."""

from __future__ import annotations

import pickle

import pytest
import torch

from kvplug.store.settings import StoreSettings
from kvplug_type1.metadata import Type1Metadata
from kvplug_type1.order import BlockOrder
from kvplug_type1.worker import Type1Worker
from support.type1_steps import Request, full, make, output, start, window

BLOCKS, WIDTH = 64, 64

#: A block of one group is larger than one of the other.
SHAPES = {"full": (BLOCKS, 2, 4, WIDTH), "sliding": (BLOCKS, 2, 4, WIDTH // 2)}


def pages(layer, size=4):
    return {layer: 2 * size * (WIDTH if layer == "full" else WIDTH // 2) * 4}


GROUPS = (full(0, pages=pages("full")), window(1, 6, pages=pages("sliding")))


class Engine:
    """Both halves of type1 around two groups, in whose caches a block's content is one number."""

    def __init__(self, *, groups=GROUPS, drop_last_hit=False, slots=32):
        shapes = {"full": (BLOCKS, 2, groups[0].block_size, WIDTH), "sliding": SHAPES["sliding"]}
        self.caches = {layer: torch.zeros(shape) for layer, shape in shapes.items()}
        self.scheduler = make(*groups)
        stride = 2 * groups[0].block_size * WIDTH * 4
        self.worker = Type1Worker(
            StoreSettings(l1_size_per_rank=slots * stride),
            groups=groups,
            num_blocks=BLOCKS,
            shard="all",
            drop_last_hit=drop_last_hit,
        )
        self.worker.register_kv_caches(self.caches)

    def compute(self, request, table, **step):
        """Compute a request's first step: block b of group g gets the number 100 * g + b. Return the metadata."""
        metadata = start(self.scheduler, request, table, **step)
        self.worker.load(metadata)
        for group, (layer, blocks) in enumerate(zip(self.caches, table, strict=True)):
            for block in blocks:
                self.caches[layer][block] = 100 * group + block
        self.worker.save(metadata)
        return metadata

    def content(self, layer, *blocks):
        """Return the number in each block; all of its bytes must agree."""
        assert all(len(self.caches[layer][block].unique()) == 1 for block in blocks)
        return [int(self.caches[layer][block].flatten()[0]) for block in blocks]

    def forget(self, key):
        """Evict one block."""
        allocator = self.worker.tier.allocator
        contents = {}
        for other in list(allocator._index):
            if other != key:
                with self.worker.tier.reading([other]) as (slot,):
                    contents[other] = self.worker.tier.slab.view(slot).tobytes()
        self.worker.tier.clear()
        with self.worker.tier.writing(list(contents)) as slots:
            for slot, content in zip(slots, contents.values(), strict=True):
                self.worker.tier.slab.view(slot)[:] = memoryview(content)


def test_all_groups_blocks_are_offered_and_saved():
    """The blocks of all groups are in one row, by where they end; each group's are saved under keys of its own."""
    metadata = start(make(*GROUPS), Request("a", range(10)), ([1, 2, 3], [4, 5, 6]))
    (load,) = metadata.loads
    assert metadata.candidates == ("a",)
    assert load.block_ids == (1, 4, 2, 5)
    assert load.groups == (0, 1, 0, 1)
    assert len(set(load.keys)) == 4
    assert [(save.group, save.block_ids) for save in metadata.saves] == [(0, (1, 2)), (1, (4, 5))]
    assert [key for save in metadata.saves for key in save.keys] == [load.keys[i] for i in (0, 2, 1, 3)]
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_blocks_behind_the_window_are_offered_too():
    """Every block of a step is offered to other requests by vLLM itself, and their windows end elsewhere."""
    engine = Engine()
    engine.compute(Request("a", range(33)), (range(1, 10), range(11, 20)))
    again = start(engine.scheduler, Request("b", range(33)), (range(21, 30), range(31, 40)))
    assert engine.worker.load(again) == {"b": 32}
    assert engine.content("full", *range(21, 29)) == list(range(1, 9))
    assert engine.content("sliding", *range(31, 39)) == list(range(111, 119))
    assert engine.content("full", 29) == engine.content("sliding", 39) == [0]
    assert not any(engine.worker.tier.allocator._pins)


@pytest.mark.parametrize(("group", "gone", "expected"), [(0, 2, 8), (1, 2, 8), (1, 0, 0), (0, 4, 16), (1, 4, 16)])
def test_a_gap_in_any_group_ends_the_hit(group, gone, expected):
    """What isn't there in one group isn't loaded in any, and nothing behind it is written."""
    engine = Engine()
    metadata = engine.compute(Request("a", range(21)), (range(1, 7), range(11, 17)))
    engine.forget(metadata.saves[group].keys[gone])
    again = start(engine.scheduler, Request("b", range(21)), (range(21, 27), range(31, 37)))
    assert engine.worker.load(again) == {"b": expected}
    blocks = expected // 4
    assert engine.content("full", *range(21, 26)) == [*range(1, 1 + blocks), *[0] * (5 - blocks)]
    assert engine.content("sliding", *range(31, 36)) == [*range(111, 111 + blocks), *[0] * (5 - blocks)]
    assert engine.worker.stats.get("blocks_loaded") == 2 * blocks


def test_a_later_chunk_goes_on_from_there():
    """A chunk offers what it is given; what a window has passed meanwhile is neither read nor written."""
    scheduler = make(*GROUPS)
    request = Request("a", range(30))
    start(scheduler, request, ([1, 2, 3], [4, 5, 6]), scheduled=10)
    second = scheduler.build_metadata(output({"a": 12}, cached=[("a", 10, ([7, 8, 9], [10, 11, 12]))]))
    assert second.loads[0].num_computed_tokens == 10
    assert second.loads[0].block_ids == (3, 6, 7, 10, 8, 11)
    assert [(save.group, save.block_ids) for save in second.saves] == [(0, (3, 7, 8)), (1, (6, 10, 11))]


def test_a_local_hit_leaves_null_blocks_behind():
    """A hit of vLLM's own has no blocks behind the window: block 0 is neither loaded nor saved."""
    metadata = start(make(*GROUPS), Request("a", range(22)), ([1, 2, 3, 4, 5, 6], [0, 0, 9, 10, 11, 12]), computed=16)
    assert metadata.loads[0].block_ids == (5, 11)
    assert [(save.group, save.block_ids) for save in metadata.saves] == [(0, (1, 2, 3, 4, 5)), (1, (9, 10, 11))]
    assert not start(make(*GROUPS), Request("a", range(22)), ([1, 2, 3, 4, 5, 6], [7, 0, 9, 10, 11, 12])).loads


def test_groups_with_blocks_of_different_sizes():
    """A hit ends where all groups have whole blocks."""
    engine = Engine(groups=(full(0, block_size=8, pages=pages("full", 8)), GROUPS[1]))
    table = ([1, 2, 3], [11, 12, 13, 14, 15, 16])
    metadata = engine.compute(Request("a", range(22)), table)
    assert metadata.loads[0].block_ids == (11, 1, 12, 13, 2, 14)
    assert metadata.loads[0].groups == (1, 0, 1, 1, 0, 1)
    assert [(save.group, save.block_ids) for save in metadata.saves] == [(0, (1, 2)), (1, (11, 12, 13, 14, 15))]
    again = start(engine.scheduler, Request("b", range(22)), ([21, 22, 23], [31, 32, 33, 34, 35, 36]))
    assert engine.worker.load(again) == {"b": 16}
    assert engine.content("full", 21, 22, 23) == [1, 2, 0]
    assert engine.content("sliding", *range(31, 36)) == [111, 112, 113, 114, 0]
    engine.forget(metadata.saves[1].keys[3])
    again = start(engine.scheduler, Request("c", range(22)), ([41, 42, 43], [51, 52, 53, 54, 55, 56]))
    assert engine.worker.load(again) == {"c": 8}
    assert engine.content("full", 41, 42) == [1, 0]


def test_the_last_blocks_of_a_hit_are_not_used_for_draft_layers():
    """E8: draft layers' KV at a block's end isn't covered by its key, whichever group they are in."""
    engine = Engine(drop_last_hit=True)
    engine.compute(Request("a", range(13)), ([1, 2, 3, 4], [11, 12, 13, 14]))
    again = start(engine.scheduler, Request("b", range(13)), ([21, 22, 23, 24], [31, 32, 33, 34]))
    assert engine.worker.load(again) == {"b": 8}
    assert engine.content("full", 23) == engine.content("sliding", 33) == [0]


def test_a3_a_copy_that_fails_in_the_second_group(monkeypatch):
    """A3: the request computes, and the first group's slots stay pinned until its copy has ended."""
    engine = Engine()
    engine.compute(Request("a", range(9)), ([1, 2, 3], [11, 12, 13]))
    running = Running(engine.worker._caches[0], monkeypatch)

    def scatter(*_args):
        raise OSError("lost")

    monkeypatch.setattr(engine.worker._caches[1], "scatter", scatter)
    again = start(engine.scheduler, Request("b", range(9)), ([21, 22, 23], [31, 32, 33]))
    assert engine.worker.load(again) == {"b": 0}
    assert engine.worker.stats.get("load_errors") == 1
    assert sum(engine.worker.tier.allocator._pins) == 4
    running.ended = True
    engine.worker.load(Type1Metadata())
    assert sum(engine.worker.tier.allocator._pins) == 0


def test_slots_stay_pinned_until_all_groups_are_copied(monkeypatch):
    """B5: the copies of a load end one after the other, on a GPU."""
    engine = Engine()
    engine.compute(Request("a", range(9)), ([1, 2, 3], [11, 12, 13]))
    first, second = (Running(cache, monkeypatch) for cache in engine.worker._caches)
    again = start(engine.scheduler, Request("b", range(9)), ([21, 22, 23], [31, 32, 33]))
    assert engine.worker.load(again) == {"b": 8}
    for one, pins in ((second, 4), (first, 0)):
        one.ended = True
        engine.worker.load(Type1Metadata())
        assert sum(engine.worker.tier.allocator._pins) == pins


class Running:
    """Loads of one group that end when the test says so."""

    def __init__(self, cache, monkeypatch):
        self.ended = False
        inner = cache.scatter

        def scatter(*args):
            inner(*args)
            return self

        monkeypatch.setattr(cache, "scatter", scatter)

    def done(self):
        return self.ended


def test_what_is_counted():
    """Blocks and bytes of all groups; a token once."""
    engine = Engine()
    engine.compute(Request("a", range(9)), ([1, 2, 3], [11, 12, 13]))
    stats = engine.worker.stats
    large, small = pages("full")["full"], pages("sliding")["sliding"]
    assert (stats.get("blocks_saved"), stats.get("tokens_saved"), stats.get("saved_bytes")) == (
        4,
        8,
        2 * (large + small),
    )
    engine.worker.load(start(engine.scheduler, Request("b", range(9)), ([21, 22, 23], [31, 32, 33])))
    assert (stats.get("blocks_hit"), stats.get("blocks_loaded"), stats.get("tokens_loaded")) == (4, 4, 8)
    assert stats.get("loaded_bytes") == 2 * (large + small)


def test_a_waiting_request_is_announced_in_the_same_order():
    """So that a prefetch ends at the first block that no tier has, of any group."""
    scheduler = make(*GROUPS)
    request = Request("a", range(10))
    scheduler.track(request)
    (waiting,) = scheduler.build_metadata(output({})).announced
    assert waiting.keys == start(scheduler, request, ([1, 2, 3], [4, 5, 6])).loads[0].keys


def test_the_order_covers_every_token_in_every_group():
    """Whatever is found of a row, the tokens that it leads to are covered in all groups, and no more is used."""
    for sizes in ((4,), (4, 4), (4, 8), (8, 4, 16), (6, 4)):
        groups = [full(number, block_size=size) for number, size in enumerate(sizes)]
        order = BlockOrder(groups)
        end = 2 * order.alignment
        for begin in range(end):
            places = [[(number, position) for position in range(end)] for number in range(len(sizes))]
            row = order.pick(places, begin, end)
            assert len(set(row)) == len(row) == sum(end // size - begin // size for size in sizes)
            ids = order.groups(begin, end)
            assert ids == (() if len(sizes) == 1 else tuple(number for number, _ in row))
            for found in range(len(row) + 1):
                used, tokens = order.usable(begin, ids, wanted=len(row), found=found)
                assert used <= found
                assert tokens % order.alignment == 0
                if tokens > begin:
                    needed = {(n, p) for n, size in enumerate(sizes) for p in range(begin // size, tokens // size)}
                    assert set(row[:used]) == needed
                # And it is the longest that there is.
                longer = max(tokens, begin // order.alignment * order.alignment) + order.alignment
                if longer <= end:
                    more = {(n, p) for n, size in enumerate(sizes) for p in range(begin // size, longer // size)}
                    assert not more <= set(row[:found])
