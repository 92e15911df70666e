"""What the two halves of type1 tell each other beside loads and saves: announcements, and what came of loads."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from kvplug import compat, dispatch
from kvplug.stats import Stats
from kvplug.store import Allocator
from kvplug.store.settings import StoreSettings
from kvplug_type1.connector import Type1Connector
from kvplug_type1.metadata import Announcement, LoadRequest, SaveRequest, Type1Metadata, Type1WorkerMetadata
from kvplug_type1.worker import Type1Worker
from support.type1_steps import Request, full, make, output, start

KEYS = tuple(bytes([n]) * 32 for n in range(10))


# -- Announcements ----------------------------------------------------------------------------------------------------


def test_a_request_that_waits_is_announced_once():
    """With the keys of its full blocks, in the first step that doesn't schedule it; not again, and not when it runs."""
    scheduler = make()
    waiting = Request("b", range(10))
    scheduler.track(waiting)
    metadata = start(scheduler, Request("a", range(20, 28)), [1, 2])
    (announced,) = metadata.announced
    assert announced.request_id == "b"
    assert scheduler.build_metadata(output({})).announced == ()
    later = start(scheduler, waiting, [3, 4, 5])
    assert later.announced == ()
    assert announced.keys == later.loads[0].keys


@pytest.mark.parametrize(
    "request_",
    [
        Request("a", range(8), prompt_embeds=object()),
        Request("a", range(8), skip_reading_prefix_cache=True),
        Request("a", range(3)),
    ],
)
def test_requests_that_load_nothing_are_not_announced(request_):
    """Uncacheable ones, those that need every position, and those without a full block."""
    scheduler = make()
    scheduler.track(request_)
    assert scheduler.build_metadata(output({})).announced == ()


def test_a_request_that_ends_before_it_was_announced_is_forgotten():
    """Aborted before the next step: there is nothing to tell, and nothing is left."""
    scheduler = make()
    request = Request("a", range(8))
    scheduler.track(request)
    scheduler.finish(request)
    assert scheduler.build_metadata(output({})).announced == ()
    assert not scheduler._unannounced


def test_a_preempted_request_is_announced_with_all_its_blocks():
    """It waits again, and will want what it has generated, too."""
    scheduler = make()
    request = Request("a", range(6))
    start(scheduler, request, [1, 2])
    request.all_token_ids += range(10, 17)
    (announced,) = scheduler.build_metadata(output({}, preempted={"a"})).announced
    assert len(announced.keys) == 13 // 4


def test_announced_blocks_are_evicted_last():
    """They count as used: the tier makes room with other blocks, and of theirs with the last one first."""
    allocator = Allocator(4)
    allocator.publish([ref for ref in allocator.reserve(KEYS[:2]) if ref])
    allocator.publish([ref for ref in allocator.reserve(KEYS[2:4]) if ref])
    assert allocator.touch_prefix([*KEYS[:2], KEYS[9]]) == 2
    allocator.reserve([KEYS[4], KEYS[5]])
    assert allocator.prefix_length(KEYS[:2]) == 2
    allocator.reserve([KEYS[6]])
    assert allocator.prefix_length(KEYS[:2]) == 1
    assert not any(allocator._pins)


def test_the_worker_counts_announced_blocks_as_used():
    """The first to come, which would be the first to go, are still there when their request's turn has come."""
    caches = {"layer.0": torch.zeros(12, 2, 4, 64)}
    worker = Type1Worker(
        StoreSettings(l1_size_per_rank=4 * 2048),
        groups=[full(pages={"layer.0": 2048})],
        num_blocks=12,
        shard="all",
        drop_last_hit=False,
    )
    worker.register_kv_caches(caches)
    for keys in (KEYS[:2], KEYS[2:4]):
        worker.save(Type1Metadata(saves=(SaveRequest("a", keys, (1, 2)),)))
    worker.load(Type1Metadata(announced=(Announcement("b", KEYS[:2]),)))
    worker.save(Type1Metadata(saves=(SaveRequest("a", KEYS[4:6], (1, 2)),)))
    assert worker.tier.allocator.prefix_length(KEYS[:2]) == 2
    assert worker.tier.allocator.prefix_length(KEYS[2:4]) == 0


# -- What came of loads ----------------------------------------------------------------------------------------------


def report(**skipped):
    return Type1WorkerMetadata(skipped)


def counts(scheduler):
    totals = scheduler.stats.totals()
    names = ("requests_looked_up", "requests_hit", "prefix_cache_queries", "prefix_cache_hits")
    return [int(totals.get(name, 0)) for name in names]


def test_i15_queries_and_hits_are_what_vllm_would_count():
    """I15: a prompt of 100 tokens, 60 of which vLLM has itself and 20 come from the store: 40 asked for, 20 hit."""
    scheduler = make()
    request = Request("a", range(100))
    start(scheduler, request, range(1, 26), computed=60)
    scheduler.take_report(report(a=20))
    assert counts(scheduler) == [1, 1, 40, 20]


def test_a_request_counts_once_however_many_chunks_it_takes():
    """Its prompt is asked for once; each chunk's hit adds tokens, and the request has one hit."""
    scheduler = make()
    request = Request("a", range(16))
    start(scheduler, request, [1, 2], scheduled=8)
    scheduler.take_report(report(a=7))
    scheduler.build_metadata(output({"a": 8}, cached=[("a", 8, [3, 4])]))
    scheduler.take_report(report(a=8))
    assert counts(scheduler) == [1, 1, 16, 15]


def test_i15_a_preempted_request_does_not_count_again():
    """I15: what is looked up again after a preemption was asked for already; vLLM's own counts leave it out, too."""
    scheduler = make()
    request = Request("a", range(8))
    start(scheduler, request, [1, 2])
    scheduler.build_metadata(output({}, preempted={"a"}))
    scheduler.build_metadata(output({"a": 8}, cached=[("a", 0, [3, 4])], resumed=["a"]))
    scheduler.take_report(report(a=7))
    assert counts(scheduler) == [1, 0, 8, 0]


def test_a_request_that_ends_with_the_step_of_its_hit_counts():
    """A request is finished before vLLM passes on what the workers tell of that step; later reports are nobody's."""
    scheduler = make()
    request = Request("a", range(8))
    start(scheduler, request, [1, 2])
    scheduler.finish(request)
    scheduler.take_report(report(a=7, unknown=3))
    assert counts(scheduler) == [1, 1, 8, 7]
    scheduler.build_metadata(output({}, finished=["a"]))
    scheduler.take_report(report(a=7))
    assert counts(scheduler) == [1, 1, 8, 7]
    assert not scheduler._finished


def test_requests_that_are_not_looked_up_do_not_count():
    """Prompt log-probabilities need every position, and an uncacheable request has no keys."""
    scheduler = make()
    start(scheduler, Request("a", range(8)), [1, 2], prompt_logprobs=1)
    start(scheduler, Request("b", range(8), prompt_embeds=object()), [3, 4])
    assert counts(scheduler) == [0, 0, 0, 0]


@pytest.fixture
def worker():
    caches = {"layer.0": torch.arange(12 * 2 * 4 * 64, dtype=torch.float32).view(12, 2, 4, 64)}
    worker = Type1Worker(
        StoreSettings(l1_size_per_rank=8 * 4096),
        groups=[full(pages={"layer.0": 2048})],
        num_blocks=12,
        shard="all",
        drop_last_hit=False,
    )
    worker.register_kv_caches(caches)
    return worker


def test_the_worker_reports_what_was_agreed(worker):
    """Not what it loaded itself: another rank may have had less. Once, and nothing where nothing was skipped."""
    worker.save(Type1Metadata(saves=(SaveRequest("a", KEYS[:2], (1, 2)),)))
    loads = (LoadRequest("a", 0, KEYS[:2], (7, 8)), LoadRequest("b", 0, KEYS[5:6], (9,)))
    assert worker.load(Type1Metadata(candidates=("a", "b"), loads=loads)) == {"a": 8, "b": 0}
    assert worker.report({"a": 4, "c": 9}).skipped == {"a": 4}
    assert worker.report({"a": 4}) is None
    worker.load(Type1Metadata(candidates=("a",), loads=loads[:1]))
    assert worker.report({}) is None


def test_the_worker_times_and_measures_what_it_copies(worker):
    """One duration per step with loads, and per step with saves; bytes are those of all layers."""
    worker.save(Type1Metadata(saves=(SaveRequest("a", KEYS[:2], (1, 2)),)))
    worker.load(Type1Metadata(candidates=("a",), loads=(LoadRequest("a", 0, KEYS[:1], (7,)),)))
    worker.load(Type1Metadata())
    worker.save(Type1Metadata())
    new = worker.stats.take()
    assert [len(new[name]) for name in ("load_seconds", "save_seconds")] == [1, 1]
    assert (new["saved_bytes"], new["loaded_bytes"]) == (2 * 2048, 2048)
    assert (new["blocks_saved"], new["tokens_saved"]) == (2, 8)


def test_the_worker_reports_its_memory_when_it_has_changed(worker):
    """Use and capacity of L1 in bytes; after a reset the use is 0 again."""
    capacity = worker.tier.capacity_bytes
    assert worker.gauges() == {"l1_usage_bytes": 0, "l1_capacity_bytes": capacity}
    assert worker.gauges() == {}
    worker.save(Type1Metadata(saves=(SaveRequest("a", KEYS[:2], (1, 2)),)))
    assert worker.gauges() == {"l1_usage_bytes": 2 * worker.tier.slab.slot_stride, "l1_capacity_bytes": capacity}
    worker.load(Type1Metadata(reset_count=1))
    assert worker.gauges()["l1_usage_bytes"] == 0


def test_reports_of_ranks_are_merged_and_travel():
    """By minimum; what one rank doesn't name, none has. They come from other processes."""
    merged = pickle.loads(pickle.dumps(report(a=4, b=2))).aggregate(report(a=3, c=1))
    assert merged.skipped == {"a": 3}


def test_the_connector_takes_reports_in_every_form():
    """Before 0.18.1 vLLM's output has no such field; nothing, or another connector's metadata, is none of ours."""
    connector = object.__new__(Type1Connector)
    connector._scheduler = make()
    start(connector.scheduler, Request("a", range(8)), [1, 2])
    for metadata in (SimpleNamespace(), SimpleNamespace(kv_connector_worker_meta=None)):
        connector.update_connector_output(metadata)
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=object()))
    assert counts(connector.scheduler)[3] == 0
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report(a=7)))
    assert counts(connector.scheduler)[3] == 7


@pytest.fixture
def reporting(worker, monkeypatch):
    """Return a worker's connector when vLLM asks it for stats: after a step that loaded 8 tokens and skipped 7."""
    connector = object.__new__(Type1Connector)
    connector._scheduler, connector._worker = None, worker
    worker.save(Type1Metadata(saves=(SaveRequest("a", KEYS[:2], (1, 2)),)))
    worker.load(Type1Metadata(candidates=("a",), loads=(LoadRequest("a", 0, KEYS[:2], (7, 8)),)))
    dispatcher = SimpleNamespace(skipped={"a": 7}, stats=Stats(), runner_class=object)
    dispatcher.stats.add("tokens_skipped", 7)
    monkeypatch.setattr(dispatch, "_current", dispatcher)
    monkeypatch.setattr(compat, "tensor_parallel_rank", lambda: 0)
    return connector


def test_before_0_18_1_the_worker_counts_hits(reporting, monkeypatch):
    """Without metadata from workers to the scheduler half, the first rank says how many tokens were saved."""
    monkeypatch.setattr(compat, "worker_metadata_class", lambda: None)
    data = reporting.get_kv_connector_stats().data
    assert (data["prefix_cache_hits"], data["tokens_skipped"], data["tokens_loaded"]) == (7, 7, 8)


def test_from_0_18_1_on_the_scheduler_half_counts_hits(reporting):
    """They would count twice otherwise."""
    assert "prefix_cache_hits" not in reporting.get_kv_connector_stats().data
    assert reporting.build_connector_worker_meta().skipped == {"a": 7}
    assert reporting.get_kv_connector_stats() is None


def test_other_ranks_stats_have_their_rank(reporting, monkeypatch):
    """A rank's memory is told apart from another's; tokens are the first rank's to report."""
    monkeypatch.setattr(compat, "tensor_parallel_rank", lambda: 1)
    data = reporting.get_kv_connector_stats().data
    assert "tokens_loaded" not in data
    assert list(data["l1_usage_bytes"]) == [1]
