"""The façade that vLLM creates: what it declares, refuses and passes on, under every form of vLLM's interface."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, supports_hma

from kvplug import compat
from kvplug.errors import ConfigError, UnsupportedError
from kvplug.hookspecs import has_hooks, needed_hooks
from kvplug.metrics import METRICS
from kvplug.scheduled import connector as module
from kvplug.scheduled.metadata import Load, Part, Save, SlabHandshake, StepMetadata, WorkerReport
from kvplug.scheduled.worker import WorkerHalf
from kvplug_type2.connector import Type2Connector
from kvplug_type2.settings import Type2Settings
from support.scheduled_steps import BLOCK, Half, Request, groups, scheduled_settings

BLOCKS, WIDTH = 12, 64


def spec(name="FullAttentionSpec", **fields):
    from vllm.v1 import kv_cache_interface

    arguments = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": WIDTH, "dtype": torch.float32, **fields}
    return getattr(kv_cache_interface, name)(**arguments)


def mamba(**fields):
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,), **fields)


def kv_cache(*specs):
    made = [SimpleNamespace(layer_names=[f"layer.{n}"], kv_cache_spec=one) for n, one in enumerate(specs or (spec(),))]
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=made)


def config(*, parallel=None, cache=None, speculative=None, graphs=None, role="kv_both", policy="fail", **extra):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"l1_size_per_rank": "1MiB", **extra}, kv_role=role, kv_load_failure_policy=policy
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, enable_prefix_caching=True, **(cache or {})),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(
            **{
                "local_world_size": 1,
                "data_parallel_size_local": 1,
                "distributed_executor_backend": None,
                "world_size": 1,
                "rank": 0,
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
            }
            | (parallel or {})
        ),
        speculative_config=speculative,
        compilation_config=SimpleNamespace(cudagraph_mode=graphs),
    )


@pytest.fixture(autouse=True)
def _without_a_model(monkeypatch):
    """A fingerprint needs a whole model's configuration."""
    monkeypatch.setattr(module, "namespace_fingerprint", lambda *_args, **_kwargs: bytes(32))


def scheduler_half(*specs, **settings):
    return Type2Connector(config(**settings), KVConnectorRole.SCHEDULER, kv_cache(*specs))


@pytest.fixture
def worker_half():
    """A worker's half with a paged cache of one layer."""
    connector = Type2Connector(config(), KVConnectorRole.WORKER, kv_cache())
    connector.register_kv_caches({"layer.0": torch.zeros(BLOCKS, 2, BLOCK, WIDTH)})
    yield connector
    connector.shutdown()


# -- What it declares -------------------------------------------------------------------------------------------------


def test_every_abstract_method_is_there():
    """Nothing is missing that vLLM demands, and what is overridden takes the arguments that vLLM's own takes."""
    assert not Type2Connector.__abstractmethods__
    for name in set(vars(Type2Connector)) & set(vars(KVConnectorBase_V1)):
        own, base = getattr(Type2Connector, name), getattr(KVConnectorBase_V1, name)
        if inspect.isroutine(own) and not name.startswith("_"):
            assert list(inspect.signature(own).parameters)[1:] == list(inspect.signature(base).parameters)[1:], name


def test_it_needs_no_hook():
    """It is told by vLLM itself; where the patch is live, the hook comes earlier."""
    assert has_hooks(Type2Connector) == {"before_blocks_reused"}
    assert needed_hooks(Type2Connector) == frozenset()


def test_e4_it_takes_several_groups():
    """E4: what it declares to vLLM is what is tested: the hybrid KV-cache manager stays on."""
    assert supports_hma(Type2Connector)
    assert Type2Connector.supports_divergent_local_hybrid_hits.fget(None) is False


def test_e4_under_a_multi_connector():
    """E4: with another that takes several groups a MultiConnector does so, too."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    type2 = {
        "kv_connector": "Type2Connector",
        "kv_connector_module_path": "kvplug_type2.connector",
        "kv_role": "kv_both",
    }
    extra = {"connectors": [type2, {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_both"}]}
    both = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    assert KVConnectorFactory.supports_hma_config(KVTransferConfig(**type2))
    assert KVConnectorFactory.supports_hma_config(both)


def test_f4_a_multi_connector_passes_on_all_that_is_overridden():
    """F4: every method of vLLM's base class that type2 has of its own reaches it through a MultiConnector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    own = {
        name
        for cls in Type2Connector.__mro__[: Type2Connector.__mro__.index(KVConnectorBase_V1)]
        for name in vars(cls)
        if not name.startswith("_")
    } & set(dir(KVConnectorBase_V1))
    assert {"handle_preemptions", "get_transfer_results", "has_pending_push_work", "reset_cache"} <= own
    assert {name for name in own if name not in vars(MultiConnector)} == set()


def test_f5_vllms_constructor():
    """F5: the arguments are vLLM's, of every name that leads here."""
    import importlib_metadata

    names = {
        entry_point.name: entry_point.load()
        for entry_point in importlib_metadata.entry_points(group="vllm.kv_connectors")
        if entry_point.dist.name == "kvplug-type2"
    }
    assert {"Type2Connector", "AIBrixOffloadingConnectorV1Type2"} <= names.keys()
    for cls in names.values():
        assert list(inspect.signature(cls).parameters) == ["vllm_config", "role", "kv_cache_config"]


def test_e7_layers_are_left_between_graphs_where_they_travel_one_by_one():
    """E7: graphs replay without the layer hooks, so vLLM is told, from the settings alone."""
    assert Type2Connector.requires_piecewise_for_cudagraph({"transfer": "layerwise"})
    assert not Type2Connector.requires_piecewise_for_cudagraph({})
    assert not Type2Connector.requires_piecewise_for_cudagraph({"transfer": "between_steps"})


def test_vllm_needs_not_wait_for_saves():
    """A dropped save is a later miss."""
    assert scheduler_half().requires_kv_delivery is False


# -- What it refuses --------------------------------------------------------------------------------------------------

SPECULATIVE = SimpleNamespace(use_eagle=lambda: False)
FULL_GRAPHS = SimpleNamespace(has_full_cudagraphs=lambda: True)


@pytest.mark.parametrize(
    ("specs", "settings", "message"),
    [
        ((), {"parallel": {"decode_context_parallel_size": 2}}, r"spread over ranks, as under decode context"),
        ((), {"parallel": {"prefill_context_parallel_size": 4}}, r"prefill context parallelism \(4\)"),
        ((), {"role": "kv_producer"}, "set kv_role to kv_both instead of kv_producer"),
        ((spec(), spec()), {"transfer": "layerwise"}, "set transfer to between_steps"),
        ((), {"transfer": "layerwise", "graphs": FULL_GRAPHS}, "cudagraph_mode to PIECEWISE"),
        ((), {"transfer": "layerwise", "policy": "recompute"}, "set transfer to between_steps, or leave"),
        ((spec(), mamba()), {"speculative": SPECULATIVE}, "recurrent state under speculative decoding"),
        ((spec("CrossAttentionSpec"),), {}, r"layer layer.0 \(CrossAttentionSpec\)"),
    ],
)
def test_what_cannot_work_is_refused(specs, settings, message):
    """One sentence says what, and what to do; on either side of the connector, before anything is served."""
    for role in KVConnectorRole:
        with pytest.raises(UnsupportedError, match=message):
            Type2Connector(config(**settings), role, kv_cache(*specs))


def test_e5_state_without_prefix_caching_is_refused():
    """E5: vLLM keeps state at the ends of blocks only with prefix caching."""
    vllm_config = config()
    vllm_config.cache_config.enable_prefix_caching = False
    with pytest.raises(UnsupportedError, match="--enable-prefix-caching"):
        Type2Connector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache(spec(), mamba()))
    Type2Connector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache(spec()))


def test_a3_several_groups_below_0_30_are_refused(monkeypatch):
    """A3: a failed load couldn't be reported there."""
    monkeypatch.setattr(compat, "reports_failed_loads", lambda: False)
    with pytest.raises(UnsupportedError, match=r"from vLLM 0\.30 on"):
        scheduler_half(spec(), spec("SlidingWindowSpec", sliding_window=8))
    scheduler_half()


def test_vllm_below_0_18_1_is_refused(monkeypatch):
    """Workers can't report there."""
    monkeypatch.setattr(compat, "worker_metadata_class", lambda: None)
    with pytest.raises(UnsupportedError, match=r"needs vLLM 0\.18\.1 or newer.*use Type1Connector"):
        scheduler_half()


def test_a_runner_that_doesnt_pass_reports_on_is_refused(monkeypatch):
    """Below 0.20.2 the second runner doesn't; only a worker can tell which runner it has."""
    monkeypatch.setattr(compat, "model_runner_in_use", lambda _: object)
    monkeypatch.setattr(compat, "reports_to_scheduler", lambda _: False)
    with pytest.raises(UnsupportedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        Type2Connector(config(), KVConnectorRole.WORKER, kv_cache())
    scheduler_half()


def test_pipeline_stages_are_taken():
    """Each stage stores its own layers, and a block counts when all stages have it."""
    connector = scheduler_half(parallel={"pipeline_parallel_size": 2, "world_size": 2})
    assert connector.scheduler.num_ranks == 2


@pytest.mark.parametrize(
    "settings", [{"l1_sise": 1}, {"transfer": "sometimes"}, {"max_parked_requests": -1}, {"l2": "nowhere"}]
)
def test_settings_that_would_be_ignored_are_errors(settings):
    """Misspelt, or out of range."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        scheduler_half(**settings)


def test_default_settings():
    """Between steps, and 16 requests that wait."""
    settings = Type2Settings.load({})
    assert (settings.transfer, settings.save_within_step, settings.max_parked_requests) == ("between_steps", False, 16)


# -- Handshakes -------------------------------------------------------------------------------------------------------


def test_handshakes_of_either_form():
    """Below 0.23 by rank, from then on by pipeline and tensor rank: the smallest slab and the largest slot count."""
    for call, keys in (
        ("set_xfer_handshake_metadata", (0, 1)),
        ("set_xfer_handshake_metadata_pp_aware", ((0, 0), (0, 1))),
    ):
        connector = scheduler_half()
        sized_by = connector.scheduler.settings.slab_sized_by
        slabs = (SlabHandshake(8, 64, sized_by), SlabHandshake(6, 96, sized_by))
        getattr(connector, call)(dict(zip(keys, slabs, strict=True)))
        assert connector.scheduler.store.allocator.capacity == 6


def test_others_handshakes_are_left_alone():
    """Under MultiConnector each child is given those of one: the workers' first reports say it instead."""
    connector = scheduler_half()
    connector.set_xfer_handshake_metadata({0: object()})
    connector.set_xfer_handshake_metadata({0: SlabHandshake(9, 64, (1, True))})  # a type2 with other settings
    connector.set_xfer_handshake_metadata({})
    assert connector.scheduler._slots is None
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=WorkerReport(SlabHandshake(5, 64))))
    assert connector.scheduler.store.allocator.capacity == 5


def test_workers_shake_hands(worker_half):
    """With what their slab is."""
    assert worker_half.get_handshake_metadata().num_slots > 0


# -- Steps ------------------------------------------------------------------------------------------------------------


def run(connector, metadata):
    """Call what a runner calls in a step, and return what is finished."""
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    connector.wait_for_layer_load("layer.0")
    connector.save_kv_layer("layer.0", None, None)
    connector.wait_for_save()
    results = connector.get_transfer_results(set())
    connector.clear_connector_metadata()
    return results


def test_a_step_through_the_facade(worker_half):
    """Saves a block and loads it elsewhere: vLLM is told once that the request can go on."""
    from tiers import eventually

    cache = torch.zeros(0)
    cache = worker_half.worker._paged.caches[0]
    assert cache.num_blocks == BLOCKS
    run(worker_half, StepMetadata(saves=(Save(0, (Part(0, (1,), (0,)),)),)))
    load = Load(1, "l", (Part(0, (2,), (0,)),), asynchronous=True)
    finished = list(run(worker_half, StepMetadata(loads=(load,))).finished_recving or ())
    eventually(lambda: (finished.extend(run(worker_half, StepMetadata(idle=True)).finished_recving or ()), finished)[1])
    assert finished == ["l"]
    assert worker_half.get_finished(set()) == (None, None)
    report = worker_half.build_connector_worker_meta()
    assert (report.loads, report.saves) == ({1: (1, False)}, {0: (1, False)})


def test_e7_without_metadata_nothing_happens(worker_half):
    """E7: dummy and warm-up runs call layer hooks and wait_for_save without bound metadata, or with another's."""
    for metadata in (None, SimpleNamespace()):
        worker_half._connector_metadata = metadata
        worker_half.start_load_kv(None)
        worker_half.wait_for_layer_load("layer.0")
        worker_half.save_kv_layer("layer.0", None, None)
        worker_half.wait_for_save()
        assert worker_half.get_finished({"a"}) == (None, None)


def test_e8_finished_is_read_after_metadata_is_cleared(worker_half):
    """E8: with drafting, vLLM clears a step's metadata later, or before it asks what has finished: both work."""
    from tiers import eventually

    worker_half.bind_connector_metadata(StepMetadata(loads=(Load(1, "l", (Part(0, (2,), (0,)),), asynchronous=True),)))
    worker_half.start_load_kv(None)
    worker_half.clear_connector_metadata()
    found = []
    eventually(lambda: (found.append(worker_half.get_finished(set())[1]), found[-1])[1])
    assert found[-1] == {"l"}


@pytest.mark.parametrize("form", ["ids", "metadata", "hook", "hook and metadata"])
def test_c9_preemptions_in_every_form(worker_half, monkeypatch, form):
    """C9: by vLLM before 0.19 with ids, after with metadata, or by the hook: `begin` runs once a step.

    Nothing is done where nothing was preempted.
    """
    begun = []
    monkeypatch.setattr(worker_half.worker, "begin", begun.append)
    metadata = StepMetadata()
    if "hook" in form:
        worker_half.before_blocks_reused(SimpleNamespace(metadata=metadata))
    if form == "ids":
        worker_half.handle_preemptions({"a"})
        worker_half.handle_preemptions(set())
        assert begun == []
    elif "metadata" in form:
        worker_half.handle_preemptions(metadata)
        worker_half.handle_preemptions(metadata)
    assert begun == ([] if form == "ids" else [metadata])


def test_c9_the_same_step_begins_once(worker_half, monkeypatch):
    """C9: preemption call and binding of one step carry its commands out once."""
    executed = []
    monkeypatch.setattr(worker_half.worker._executor, "execute", lambda *arguments: executed.append(arguments))
    metadata = StepMetadata()
    worker_half.handle_preemptions(metadata)
    worker_half.bind_connector_metadata(metadata)
    assert len(executed) == 1


def test_failed_loads_are_told_either_way(worker_half):
    """By block ids, and from 0.30 on by request, which is counted among the finished as well."""
    worker_half.worker._finished, worker_half.worker._failed = {"a", "b"}, {"b"}
    worker_half.worker._failed_blocks = {3}
    results = worker_half.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"b"})
    assert worker_half.get_block_ids_with_load_errors() == {3}
    assert worker_half.get_block_ids_with_load_errors() == set()


def test_f3_each_id_is_told_once_whatever_vllm_says_has_finished(worker_half):
    """F3: ids that vLLM names as finished (aborted) aren't told for that."""
    worker_half.worker._finished = {"a"}
    assert worker_half.get_finished({"x"}) == (None, {"a"})
    assert worker_half.get_finished({"a"}) == (None, None)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([{1: (1, False)}, {1: (1, False)}], {1: (2, False)}),
        ([None, {1: (1, True)}], {1: (1, True)}),
        (["no output", {1: (1, False)}], {1: (1, False)}),
        (["no output", None], None),
    ],
)
def test_f1_e9_what_ranks_report_is_aggregated(ranks, expected):
    """F1, E9: ranks with a report, without one, and without any connector output at all, in any order."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    def output_of(rank):
        if rank == "no output":
            return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=None)
        report = None if rank is None else WorkerReport(loads=rank)
        connector = KVConnectorOutput(kv_connector_worker_meta=report)
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=connector)

    merged = KVOutputAggregator(len(ranks)).aggregate([output_of(rank) for rank in ranks]).kv_connector_output
    report = merged.kv_connector_worker_meta
    assert (None if report is None else report.loads) == expected
    scheduler_half().update_connector_output(merged)


# -- The scheduler's side ---------------------------------------------------------------------------------------------


@pytest.fixture
def facade():
    """A façade over a scheduler half in which four blocks are stored."""
    half = Half()
    half.store(range(17))
    connector = scheduler_half()
    connector._scheduler = half.scheduler
    return connector


def test_a_request_through_the_facade(facade):
    """Looked up, admitted, and finished in either form: nothing stays pinned."""
    request = Request("a", range(17))
    assert facade.get_num_new_matched_tokens(request, 4) == (12, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5],))
    facade.update_state_after_alloc(request, blocks, 12)
    assert sum(facade.get_external_cache_hit_sources(request, 12).values()) == 12
    for _ in range(2):
        assert facade.request_finished(request, []) == (False, None)
        assert facade.request_finished_all_groups(request, ()) == (False, None)
    # The load is still under way: an idle engine sees its end, and nothing is certain to be forgotten before.
    assert facade.has_pending_push_work()
    assert facade.reset_cache() is False


@pytest.mark.parametrize("blocks", [[[]], [[1, 2, 3, 4, 5]]])
def test_f3_nothing_is_loaded_to_blocks_that_another_loads_to(facade, blocks):
    """F3: MultiConnector hands other children 0 tokens, with empty blocks below 0.29."""
    request = Request("a", range(17))
    facade.get_num_new_matched_tokens(request, 0)
    facade.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: blocks), 0)
    assert facade.scheduler.num_transfers == 0
    assert sum(facade.scheduler.store.allocator._pins) == 0


def test_reports_of_others_are_left_alone(facade):
    """No report, or another connector's."""
    for report in (None, object()):
        facade.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))


def test_sources_in_vllms_words():
    """Host memory; the disk tier is a disk; stores beyond are what vLLM has no name for."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as Source

    assert compat.cache_hit_sources(4, 8, {"disk"}) == {Source.HOST: 4, Source.DISK: 8}
    assert compat.cache_hit_sources(0, 8, {"valkey"}) == {Source.EXTERNAL_UNSPECIFIED: 8}
    assert compat.cache_hit_sources(4, 0, ()) == {Source.HOST: 4}


def test_each_half_knows_only_its_own():
    """A half that is asked for the other is a bug in the caller."""
    with pytest.raises(AssertionError, match="scheduler's half"):
        scheduler_half().worker  # noqa: B018
    connector = Type2Connector(config(), KVConnectorRole.WORKER, kv_cache())
    with pytest.raises(AssertionError, match="worker's half"):
        connector.scheduler  # noqa: B018
    connector.shutdown()
    scheduler_half().shutdown()


# -- Metrics ----------------------------------------------------------------------------------------------------------


def test_stats_of_both_halves_are_metrics(facade, worker_half, monkeypatch):
    """All that either half counts has a metric, so that none is lost on the way to /metrics."""
    monkeypatch.setattr(compat, "tensor_parallel_rank", lambda: 0)
    worker = worker_half.worker
    for name in ("load_errors", "save_errors", "blocks_loaded", "blocks_saved", "loaded_bytes", "saved_bytes"):
        worker.stats.add(name)
    worker.stats.observe("overwrite_wait_seconds", 0.1)
    facade.scheduler.stats.add("l2_load_timeouts")
    facade.scheduler.stats.add("saves_refused")
    for connector in (facade, worker_half):
        stats = connector.get_kv_connector_stats()
        assert {name.split(":")[0] for name in stats.data} <= METRICS.keys()
        assert connector.get_kv_connector_stats() is None
        assert Type2Connector.build_kv_connector_stats(stats.data).data == stats.data
    assert Type2Connector.build_kv_connector_stats().data == {}


def test_names_in_the_sources_are_metrics():
    """What the code counts under a fixed name is in the list of metrics."""
    import re
    from pathlib import Path

    names = set()
    for path in Path(module.__file__).parent.glob("*.py"):
        names |= set(re.findall(r"(?:stats|_stats)\.(?:add|observe)\(\s*\"([a-z0-9_]+)\"", path.read_text()))
    assert {"requests_looked_up", "overwrite_wait_seconds", "saves_refused"} <= names
    assert names <= METRICS.keys()


def test_other_ranks_stats_have_their_rank(worker_half, monkeypatch):
    """A rank's memory is told apart from another's."""
    monkeypatch.setattr(compat, "tensor_parallel_rank", lambda: 1)
    assert list(worker_half.get_kv_connector_stats().data["l1_capacity_bytes"]) == [1]


def test_d10_any_block_size():
    """D10: equal to vLLM's cache block size, or not: each group's own counts, and both halves agree on the slots."""
    for size in (16, 48, 128):
        group = spec(block_size=size)
        scheduler = scheduler_half(group)
        worker = Type2Connector(config(), KVConnectorRole.WORKER, kv_cache(group))
        worker.register_kv_caches({"layer.0": torch.zeros(BLOCKS, 2, size, WIDTH)})
        scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
        assert scheduler.scheduler.groups[0].block_size == size
        worker.shutdown()


def test_the_worker_is_told_of_early_zeroing(monkeypatch):
    """Where the runner overwrites blocks before it tells, saves stay within their step."""
    monkeypatch.setattr(compat, "overwrites_before_connectors", lambda *_: True)
    connector = Type2Connector(config(), KVConnectorRole.WORKER, kv_cache())
    assert connector.worker._within_step
    worker = WorkerHalf(scheduled_settings(), groups=groups(), num_blocks=BLOCKS, shard="", rank=0)
    assert not worker._within_step
