"""Public failures at the border to vLLM (their ids are in the names), tried on type1's façade and vLLM's classes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvplug_type1.connector import Type1Connector
from kvplug_type1.metadata import Type1WorkerMetadata
from support.type1_steps import Request, make, start


@pytest.mark.parametrize("size", [16, 32, 48, 128])
def test_d10_both_halves_take_the_block_size_of_the_kv_cache(monkeypatch, size):
    """D10: equal to vLLM's cache block size, a multiple, or neither: one size, from the group that is stored."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvplug import compat
    from kvplug_type1 import connector

    monkeypatch.setattr(compat, "require_hook_support", lambda *_args: None)
    monkeypatch.setattr(connector, "namespace_fingerprint", lambda *_args, **_kwargs: bytes(32))
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
    kv_cache = SimpleNamespace(num_blocks=5, kv_cache_groups=[group])
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"l1_size_per_rank": "1MiB"}),
        cache_config=SimpleNamespace(block_size=32),
        scheduler_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(
            local_world_size=1, data_parallel_size_local=1, distributed_executor_backend=None
        ),
        speculative_config=None,
    )
    scheduler = Type1Connector(config, KVConnectorRole.SCHEDULER, kv_cache)
    worker = Type1Connector(config, KVConnectorRole.WORKER, kv_cache)
    worker.register_kv_caches({"layer": torch.zeros(5, 2, size, 8)})
    metadata = start(scheduler.scheduler, Request("a", range(2 * size + 1)), [1, 2, 3])
    assert metadata.saves[0].block_ids == (1, 2)
    worker.worker.load(metadata)
    worker.worker.save(metadata)
    again = start(scheduler.scheduler, Request("b", range(2 * size + 1)), [3, 4, 1])
    assert worker.worker.load(again) == {"b": 2 * size}
    worker.shutdown()


def test_e4_a_multi_connector_takes_what_its_children_take():
    """E4: type1 takes several KV-cache groups, and so does a MultiConnector whose other children do."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    type1 = {
        "kv_connector": "Type1Connector",
        "kv_connector_module_path": "kvplug_type1.connector",
        "kv_role": "kv_both",
    }
    other = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_both"}
    without = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}

    def supports(*children):
        extra = {"connectors": list(children)}
        config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        return KVConnectorFactory.supports_hma_config(config)

    assert KVConnectorFactory.supports_hma_config(KVTransferConfig(**type1))
    assert supports(type1)
    assert supports(type1, other)
    assert supports(other, type1)
    assert not supports(type1, without)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([{"a": 8, "b": 4}, {"a": 8, "b": 4}], {"a": 8, "b": 4}),
        ([None, {"a": 8}, "no output"], {"a": 8}),
        (["no output", None], None),
        (["no output", "no output"], None),
    ],
)
def test_f1_what_ranks_report_is_aggregated(ranks, expected):
    """F1: ranks with a report, without one, and without any connector output at all, in any order."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    def output_of(rank):
        if rank == "no output":
            return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=None)
        report = None if rank is None else Type1WorkerMetadata(rank)
        connector = KVConnectorOutput(kv_connector_worker_meta=report)
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=connector)

    merged = KVOutputAggregator(len(ranks)).aggregate([output_of(rank) for rank in ranks]).kv_connector_output
    report = merged.kv_connector_worker_meta
    assert (None if report is None else report.skipped) == expected
    connector = object.__new__(Type1Connector)
    connector._scheduler, connector._worker = make(), None
    connector.update_connector_output(merged)
    assert merged.finished_recving is None
    assert merged.invalid_block_ids == set()


def test_f4_a_multi_connector_passes_on_all_that_is_overridden():
    """F4: every method of vLLM's base class that type1 has of its own reaches it through a MultiConnector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    own = {name for name in vars(Type1Connector) if not name.startswith("_")} & set(dir(KVConnectorBase_V1))
    assert {"wait_for_save", "request_finished", "reset_cache", "requires_kv_delivery"} <= own
    assert {name for name in own if name not in vars(MultiConnector)} == set()


def test_f5_every_entry_point_has_vllms_constructor():
    """F5: each name that our distributions give vLLM leads to a class with its three arguments."""
    import inspect

    import importlib_metadata

    found = {
        entry_point.name: entry_point.load()
        for entry_point in importlib_metadata.entry_points(group="vllm.kv_connectors")
        if entry_point.dist.name.startswith("kvplug")
    }
    assert {"Type1Connector", "AIBrixOffloadingConnectorV1Type1"} <= found.keys()
    for name, cls in found.items():
        assert list(inspect.signature(cls).parameters) == ["vllm_config", "role", "kv_cache_config"], name
