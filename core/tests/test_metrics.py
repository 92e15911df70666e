"""type1's counts on their way through vLLM's own classes: none can end the API server or the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from kvplug_type1.connector import Type1Connector


def _output(stats):
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    output = None if stats is None else KVConnectorOutput(kv_connector_stats=stats)
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)


def _stats(**counts):
    return Type1Connector.build_kv_connector_stats(dict(counts))


def test_f1_ranks_without_an_output_are_aggregated():
    """The aggregator takes ranks with counts, without any, and without an output at all, in any order."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    empty = _stats()
    for ranks in ([_stats(load_errors=1), None, _stats(load_errors=2)], [None, _stats(load_errors=3), empty]):
        merged = KVOutputAggregator(len(ranks)).aggregate([_output(rank) for rank in ranks])
        assert merged.kv_connector_output.kv_connector_stats.data == {"load_errors": 3}
    merged = KVOutputAggregator(2).aggregate([_output(None), _output(None)])
    assert merged.kv_connector_output.kv_connector_stats is None


def test_the_log_line_has_the_interval():
    """The logger adds steps up, reports them and starts anew."""
    total = _stats(tokens_loaded=5).aggregate(_stats(tokens_loaded=3, blocks_hit=1))
    assert total.reduce() == {"tokens_loaded": 8, "blocks_hit": 1}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


class Recorded:
    """Stands in for a Prometheus counter."""

    made: ClassVar[dict] = {}

    def __init__(self, name, documentation, labelnames):
        self.name, self.value = name, 0
        Recorded.made[name] = self

    def labels(self, *_values):
        return self

    def inc(self, amount):
        if amount == 13:
            raise ValueError("unlucky")
        self.value += amount


def _metrics(counter=Recorded):
    from prometheus_client import Counter, Gauge, Histogram

    types = {Counter: counter, Gauge: Recorded, Histogram: Recorded}
    config = SimpleNamespace(kv_transfer_config=None)
    return Type1Connector.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})


def test_counts_reach_prometheus():
    """Each counter has vLLM's prefix and grows by what a step reports; unknown names and engines are ignored."""
    metrics = _metrics()
    metrics.observe({"tokens_loaded": 7, "vetoes_pooling": 1})
    metrics.observe({"tokens_loaded": 2}, engine_idx=9)
    assert Recorded.made["vllm:kvplug_tokens_loaded"].value == 7


def test_an_error_in_metrics_is_logged_not_raised(caplog):
    """An exception in observe() would end the API server's loop."""
    _metrics().observe({"tokens_loaded": 13})
    assert "unlucky" in caplog.text


def test_metrics_that_cannot_be_registered_are_left_out(caplog):
    """An exception in build_prom_metrics would end the API server."""

    def broken(**_kwargs):
        raise ValueError("Duplicated timeseries")

    assert _metrics(broken) is None
    assert "Duplicated timeseries" in caplog.text
