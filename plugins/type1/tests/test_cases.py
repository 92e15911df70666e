"""Public failures of other connectors (their ids are in the names), tried on type1's two halves together."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch

from kvplug.paged import Transfer
from kvplug.store.settings import StoreSettings
from kvplug_type1.connector import Type1Connector
from kvplug_type1.metadata import Type1Metadata
from kvplug_type1.scheduler import Type1Scheduler
from kvplug_type1.worker import Type1Worker
from support.type1_steps import BLOCK, Request, full, make, output, start

BLOCKS, WIDTH = 24, 64


@dataclass
class Engine:
    """Both halves of type1 around a paged cache of one layer, in which a block's content is one number."""

    scheduler: Type1Scheduler = field(default_factory=make)
    cache: torch.Tensor = field(default_factory=lambda: torch.zeros(BLOCKS, 2, BLOCK, WIDTH))
    worker: Type1Worker = field(init=False)

    def __post_init__(self):
        group = full(pages={"layer": 2 * BLOCK * WIDTH * 4})
        settings = StoreSettings(l1_size_per_rank=16 * 4096)
        self.worker = Type1Worker(settings, groups=[group], num_blocks=BLOCKS, shard="all", drop_last_hit=False)
        self.worker.register_kv_caches({"layer": self.cache})

    def run(self, metadata, forward=None):
        """Run a step in the worker; `forward` says which number each block gets. Return what the hook answered."""
        answer = self.worker.load(metadata)
        for block, number in (forward or {}).items():
            self.cache[block] = number
        self.worker.save(metadata)
        return answer

    def content(self, *blocks):
        """Return the number in each block; all of its bytes must agree."""
        assert all(len(self.cache[block].unique()) == 1 for block in blocks)
        return [int(self.cache[block].flatten()[0]) for block in blocks]

    @property
    def pins(self):
        return sum(self.worker.tier.allocator._pins)


class LateCopy:
    """A copy that ends when the test says so, as on a GPU."""

    def __init__(self, paged, what, monkeypatch):
        self.ended = False
        inner = getattr(paged, what)
        monkeypatch.setattr(paged, what, lambda *args: (inner(*args), Transfer(self))[1])

    def query(self):
        return self.ended

    def synchronize(self):
        self.ended = True


@pytest.fixture
def engine():
    """An engine in which request `a` has stored four blocks, whose content is 1, 2, 3 and 4."""
    engine = Engine()
    engine.run(start(engine.scheduler, Request("a", range(17)), [1, 2, 3, 4, 5]), {n: n for n in (1, 2, 3, 4)})
    return engine


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a1_a2_a_load_that_breaks_off_at_any_block(engine, monkeypatch, bad):
    """A1, A2: first, middle or last block fails after others were written: all are computed, and none is reported bad.

    Two requests of one step fail on the same block: both compute. The next load is right.
    """
    inner = engine.worker.paged.scatter

    def scatter(slab, slots, block_ids):
        inner(slab, slots[:bad], block_ids[:bad])
        engine.cache[block_ids[bad]] = 99  # half written
        raise OSError("the read ended early")

    requests = [Request("b", range(17)), Request("c", range(17))]
    blocks = {"b": [6, 7, 8, 9, 10], "c": [11, 12, 13, 14, 15]}
    for request in requests:
        engine.scheduler.track(request, 0)
    step = output({"b": 17, "c": 17}, new=[(name, 0, blocks[name]) for name in blocks])
    with monkeypatch.context() as patch:
        patch.setattr(engine.worker.paged, "scatter", scatter)
        computed = {block: n for table in blocks.values() for n, block in enumerate(table[:4], 1)}
        assert engine.run(engine.scheduler.build_metadata(step), computed) == {"b": 0, "c": 0}
    assert engine.worker.stats.get("load_errors") == 2
    assert engine.pins == 0
    assert engine.run(start(engine.scheduler, Request("d", range(17)), [16, 17, 18, 19, 20])) == {"d": 16}
    assert engine.content(16, 17, 18, 19) == [1, 2, 3, 4]


@pytest.mark.parametrize("stored", list(itertools.product([False, True], repeat=4)))
def test_a6_b8_only_what_is_there_counts_whatever_else_is(stored):
    """A6, B8: whichever blocks are stored, wherever vLLM's own hit ends: the unbroken run from there, and no more.

    Never less than nothing, and not one other block is written.
    """
    keys = start(make(), Request("a", range(16)), [1, 2, 3, 4]).saves[0].keys
    for computed in range(16):
        engine = Engine()
        refs = [ref for ref in engine.worker.tier.allocator.reserve(list(itertools.compress(keys, stored))) if ref]
        for ref in refs:
            engine.worker.tier.slab.view(ref.slot)[:] = 1
        engine.worker.tier.allocator.publish(refs)
        metadata = start(engine.scheduler, Request("b", range(16)), [5, 6, 7, 8], computed=computed)
        answer = engine.worker.load(metadata)
        run = sum(1 for _ in itertools.takewhile(bool, stored[computed // BLOCK :]))
        expected = max(0, (computed // BLOCK + run) * BLOCK - computed)
        # A last token whose block is stored is still computed: nothing is offered for it alone.
        assert answer == ({"b": expected} if computed < 15 else {})
        touched = {block for block in range(BLOCKS) if engine.cache[block].any()}
        assert touched == (set(range(5 + computed // BLOCK, 5 + computed // BLOCK + run)) if computed < 15 else set())
        assert engine.pins == 0


def test_a6_a_lookup_that_raises_is_a_miss(engine, monkeypatch):
    """A6: whatever the store raises when it is asked, the other requests of the step keep their hits."""
    inner = engine.worker.tier.allocator.pin_prefix
    calls = []

    def pin_prefix(keys, **options):
        calls.append(keys)
        if len(calls) == 1:
            raise RuntimeError("lost")
        return inner(keys, **options)

    monkeypatch.setattr(engine.worker.tier.allocator, "pin_prefix", pin_prefix)
    for name in "bc":
        engine.scheduler.track(Request(name, range(17)), 0)
    tables = [("b", 0, [6, 7, 8, 9, 10]), ("c", 0, [11, 12, 13, 14, 15])]
    assert engine.run(engine.scheduler.build_metadata(output({"b": 17, "c": 17}, new=tables))) == {"b": 0, "c": 16}
    assert engine.worker.stats.get("load_errors") == 1


@pytest.mark.parametrize("what", ["reserve", "publish"])
def test_a7_a_store_that_raises_costs_hits_only(engine, monkeypatch, what):
    """A7: the store's bookkeeping may raise (anybody may write a policy): the step goes on, and so do later saves."""
    other = range(100, 109)
    with monkeypatch.context() as patch:

        def fail(*_args):
            raise KeyError("no such slot")

        patch.setattr(engine.worker.tier.allocator, what, fail)
        engine.run(start(engine.scheduler, Request("b", other), [6, 7, 8]), {6: 60, 7: 70})
    assert engine.worker.stats.get("save_errors") == 1
    engine.run(start(engine.scheduler, Request("c", range(200, 209)), [9, 10, 11]), {9: 90, 10: 91})
    assert engine.run(start(engine.scheduler, Request("d", range(200, 209)), [12, 13, 14])) == {"d": 8}
    assert engine.content(12, 13) == [90, 91]


@pytest.mark.parametrize("lookups", [(0,), (0, 0), (0, 4, 8), (8, 4, 4, 0, 0)])
def test_b9_b10_a_lookup_has_no_side_effects(lookups):
    """B9, B10: however often vLLM looks a request up, and whatever it has itself by then: the same answer and work."""
    connector = object.__new__(Type1Connector)
    connector._scheduler, connector._worker = make(), None
    request = Request("a", range(17))
    assert {connector.get_num_new_matched_tokens(request, local) for local in lookups} == {(0, False)}
    connector.update_state_after_alloc(request, None, 0)
    step = output({"a": 13}, new=[("a", 4, [1, 2, 3, 4, 5])])
    metadata = connector.build_connector_meta(step)
    assert metadata == start(make(), Request("a", range(17)), [1, 2, 3, 4, 5], computed=4)
    assert connector.scheduler.num_tracked_requests == 1


@pytest.mark.parametrize("late", [False, True])
def test_c1_a_preempted_requests_blocks_may_be_overwritten_at_once(engine, monkeypatch, late):
    """C1: what is stored is what the step computed, whoever gets the block next, also where the copy ends later."""
    copy = LateCopy(engine.worker.paged, "gather", monkeypatch) if late else None
    other = range(100, 109)
    engine.run(start(engine.scheduler, Request("b", other), [6, 7, 8]), {6: 60, 7: 70})
    engine.run(engine.scheduler.build_metadata(output({}, preempted={"b"})), {6: 99, 7: 99})
    if copy:
        copy.ended = True
    assert engine.run(start(engine.scheduler, Request("c", other), [9, 10, 11])) == {"c": 8}
    assert engine.content(9, 10) == [60, 70]


def test_c3_resumed_while_its_save_is_still_under_way(engine, monkeypatch):
    """C3: a request that is preempted and scheduled again before its save has ended: the save is done once."""
    copy = LateCopy(engine.worker.paged, "gather", monkeypatch)
    request = Request("b", range(100, 109))
    engine.run(start(engine.scheduler, request, [6, 7, 8]), {6: 60, 7: 70})
    saved = engine.worker.stats.get("blocks_saved")
    for blocks in ([9, 10, 11], [12, 13, 14]):
        engine.run(engine.scheduler.build_metadata(output({}, preempted={"b"})))
        resumed = engine.scheduler.build_metadata(output({"b": 9}, cached=[("b", 0, blocks)], resumed=["b"]))
        assert engine.run(resumed, {blocks[0]: 60, blocks[1]: 70}) == {"b": 0}
    assert engine.worker.stats.get("blocks_saved") == saved
    copy.ended = True
    assert engine.run(start(engine.scheduler, Request("c", request.all_token_ids), [15, 16, 17])) == {"c": 8}
    assert engine.worker.stats.get("blocks_saved") == saved + 2
    assert engine.worker.tier.allocator.used == 6
    assert not engine.worker._pending
    assert engine.pins == 0


def test_c7_a_finished_request_without_blocks():
    """C7: vLLM may report a request with no blocks, one that was never looked up, and one twice: all are answered."""
    connector = object.__new__(Type1Connector)
    connector._scheduler, connector._worker = make(), None
    known, unknown = Request("a", range(9)), Request("b", range(9))
    connector.get_num_new_matched_tokens(known, 0)
    for request in (known, unknown, known):
        assert connector.request_finished(request, []) == (False, None)
    assert connector.scheduler.num_tracked_requests == 0


def test_c11_finished_with_a_step_in_flight():
    """C11: asynchronous scheduling learns that a request has finished after it has planned its next step.

    That step still saves a block; who gets the block next comes after it. From the notice on no step names it.
    """
    engine = Engine()
    queue = deque()
    first = Request("a", range(7))
    queue.append((start(engine.scheduler, first, [1, 2]), {1: 10}))
    first.all_token_ids.append(7)
    queue.append((engine.scheduler.build_metadata(output({"a": 1}, cached=[("a", 7, [])])), {2: 20}))
    # The first step's result is in: its token ends the request. The second one is still on its way.
    engine.run(*queue.popleft())
    engine.scheduler.finish(first)
    second = Request("b", range(50, 59))
    queue.append((start(engine.scheduler, second, [1, 2, 3], finished=["a"]), {1: 30, 2: 40}))
    queue.append((engine.scheduler.build_metadata(output({"b": 1}, cached=[("b", 9, None)])), {}))
    for metadata, _ in list(queue)[1:]:
        assert {r.request_id for r in (*metadata.loads, *metadata.saves)} <= {"b"}
    while queue:
        engine.run(*queue.popleft())
    assert engine.run(start(engine.scheduler, Request("c", range(9)), [4, 5, 6])) == {"c": 8}
    assert engine.run(start(engine.scheduler, Request("d", range(50, 59)), [7, 8, 9])) == {"d": 8}
    assert engine.content(4, 5, 7, 8) == [10, 20, 30, 40]


def test_e7_nothing_is_done_per_layer():
    """E7: loads come before the step and saves after it, so full CUDA graphs, which replay no layer hooks, are fine."""
    assert not Type1Connector.requires_piecewise_for_cudagraph({})
    engine = Engine()
    connector = object.__new__(Type1Connector)
    connector._scheduler, connector._worker, connector._connector_metadata = None, engine.worker, None
    metadata = start(engine.scheduler, Request("a", range(9)), [1, 2, 3])
    engine.worker.load(metadata)
    connector.bind_connector_metadata(metadata)
    engine.cache[1], engine.cache[2] = 10, 20
    connector.wait_for_save()  # neither start_load_kv nor a layer's hook was called
    connector.clear_connector_metadata()
    assert engine.worker.stats.get("blocks_saved") == 2


def test_f1_a_step_without_tokens():
    """F1: an idle step carries what there is to tell, a reset for one, and loads and saves nothing."""
    engine = Engine()
    engine.run(start(engine.scheduler, Request("a", range(9)), [1, 2, 3]), {1: 10, 2: 20})
    engine.scheduler.reset()
    assert engine.run(engine.scheduler.build_metadata(output({}, finished=["a"]))) == {}
    assert engine.worker.tier.allocator.used == 0
    assert engine.run(Type1Metadata(reset_count=1)) == {}
