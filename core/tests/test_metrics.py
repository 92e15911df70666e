"""Stats on their way through vLLM's own classes: none can end the API server or the scheduler."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvplug import metrics as metrics_module
from kvplug.log import RateLimited
from kvplug.metrics import METRICS, ConnectorPromMetrics, ConnectorStats, of_every_rank

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def stats(**data):
    return ConnectorStats(data=dict(data))


def _output(rank_stats):
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    output = None if rank_stats is None else KVConnectorOutput(kv_connector_stats=rank_stats)
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)


def test_f1_ranks_without_an_output_are_aggregated():
    """F1: the aggregator takes ranks with counts, without any, and without an output at all, in any order."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    empty = stats()
    for ranks in ([stats(load_errors=1), None, stats(load_errors=2)], [None, stats(load_errors=3), empty]):
        merged = KVOutputAggregator(len(ranks)).aggregate([_output(rank) for rank in ranks])
        assert merged.kv_connector_output.kv_connector_stats.data == {"load_errors": 3}
    merged = KVOutputAggregator(2).aggregate([_output(None), _output(None)])
    assert merged.kv_connector_output.kv_connector_stats is None


def test_values_add_up_by_their_kind():
    """Counts are added, observations put together; of a gauge, each rank's latest value counts."""
    first = stats(tokens_loaded=5, load_seconds=[0.1], l1_usage_bytes={0: 10, 1: 20})
    total = first.aggregate(stats(tokens_loaded=3, load_seconds=[0.3], l1_usage_bytes={0: 15}, blocks_hit=1))
    assert total.data == {
        "tokens_loaded": 8,
        "load_seconds": [0.1, 0.3],
        "l1_usage_bytes": {0: 15, 1: 20},
        "blocks_hit": 1,
    }


def test_the_log_line_has_the_interval():
    """The log line shows sums, mean durations in milliseconds, and gauges over all ranks; then it starts anew."""
    total = stats(tokens_loaded=8, load_seconds=[0.1, 0.3], l1_usage_bytes={0: 15, 1: 20}, **{"vetoes:pooling": 1})
    line = {"tokens_loaded": 8, "load_mean_ms": 200.0, "l1_usage_bytes": 35, "vetoes:pooling": 1}
    assert total.reduce() == line
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert stats(tokens_loaded=0, load_seconds=[], l1_usage_bytes={0: 1}).is_empty()


@pytest.mark.parametrize("bad", [None, "text", {0: 1}, [1], math.nan])
def test_values_of_another_kind_end_nothing(bad, caplog):
    """A worker of another release may send anything under a known name."""
    total = stats(tokens_loaded=1, load_seconds=[0.1], blocks_hit=2)
    total.aggregate(stats(tokens_loaded=bad, load_seconds=bad, blocks_hit=3))
    assert total.data["blocks_hit"] == 5
    metrics = real_metrics()
    metrics.observe({"tokens_loaded": bad, "load_seconds": bad, "l1_usage_bytes": bad, "blocks_hit": 3})
    metrics.observe(bad)
    metrics.observe({7: 3})
    assert sample("blocks_hit_total") == 3
    assert "couldn't be" in caplog.text


def test_other_ranks_report_what_is_theirs():
    """Errors, bytes and durations are every rank's own; tokens and requests are the first one's to report."""
    mine = {"tokens_loaded": 1, "load_errors": 1, "saved_bytes": 9, "vetoes:pooling": 1, "hook_seconds": [0.1], "x": 1}
    assert of_every_rank(mine) == {"load_errors": 1, "saved_bytes": 9, "hook_seconds": [0.1]}


LABELS = ["model_name", "engine"]


@pytest.fixture(autouse=True)
def _each_alone(monkeypatch):
    """Log every warning, and take away what a test registered, as vLLM does when a second engine starts."""
    monkeypatch.setattr(metrics_module, "_limited", RateLimited(metrics_module.logger, 0))
    yield
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()


def real_metrics(**types):
    """Make the metrics of Prometheus' own classes for two engines."""
    from prometheus_client import Counter, Gauge, Histogram

    metric_types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram} | types.get("types", {})
    config = SimpleNamespace(kv_transfer_config=None)
    return ConnectorPromMetrics(config, metric_types, LABELS, {0: ["m", "0"], 1: ["m", "1"]})


def sample(name, engine="0", **labels):
    """Return a sample of the registry, as a scrape would show it."""
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(f"vllm:kvplug_{name}", {"model_name": "m", "engine": engine, **labels})


def test_what_a_step_reports_can_be_scraped():
    """Counters grow, histograms take each value, gauges add up ranks; labels are vLLM's, and a veto's reason."""
    metrics = real_metrics()
    assert sample("tokens_loaded_total") == 0
    metrics.observe({"tokens_loaded": 7, "vetoes:pooling": 1, "load_seconds": [0.002, 0.5]})
    metrics.observe({"tokens_loaded": 2, "l1_usage_bytes": {0: 10, 1: 5}}, engine_idx=1)
    metrics.observe({"l1_usage_bytes": {1: 7}}, engine_idx=1)
    metrics.observe({"tokens_loaded": 2}, engine_idx=9)
    assert sample("tokens_loaded_total") == 7
    assert sample("tokens_loaded_total", engine="1") == 2
    assert sample("vetoes_total", reason="pooling") == 1
    assert sample("load_seconds_bucket", le="0.003") == 1
    assert sample("load_seconds_sum") == pytest.approx(0.502)
    assert sample("l1_usage_bytes", engine="1") == 17


def test_counts_never_go_down(caplog):
    """I15: Prometheus raises for a negative growth, which would end the API server."""
    metrics = real_metrics()
    metrics.observe({"tokens_loaded": 7})
    metrics.observe({"tokens_loaded": -3})
    assert sample("tokens_loaded_total") == 7
    assert not caplog.text


def test_an_error_in_one_metric_is_logged_and_spares_the_others(caplog):
    """An exception in observe() would end the API server's loop."""
    metrics = real_metrics()

    class Broken:
        def inc(self, _amount):
            raise ValueError("unlucky")

    metrics._children[0, "tokens_loaded"] = Broken()
    metrics.observe({"tokens_loaded": 13, "blocks_hit": 2})
    assert "unlucky" in caplog.text
    assert sample("blocks_hit_total") == 2


def test_metrics_that_cannot_be_registered_are_left_out(caplog):
    """An exception in build_prom_metrics would end the API server; under MultiConnector, so would None."""
    from prometheus_client import Counter

    def broken(**_kwargs):
        raise TypeError("no such argument")

    metrics = real_metrics(types={Counter: broken})
    metrics.observe({"tokens_loaded": 1, "load_seconds": [0.1]})
    assert "tokens_loaded couldn't be registered" in caplog.text
    assert sample("load_seconds_count") == 1


def test_two_connectors_share_metrics():
    """Two kvplug connectors in one MultiConnector register the same names: both count there."""
    first, second = real_metrics(), real_metrics()
    first.observe({"tokens_loaded": 1})
    second.observe({"tokens_loaded": 2})
    assert sample("tokens_loaded_total") == 3


def test_the_page_has_every_metric():
    """docs/metrics.md lists each metric under the name that a scrape has, and no others."""
    scraped = {
        f"vllm:kvplug_{name}_total" if metric.kind == "counter" else f"vllm:kvplug_{name}"
        for name, metric in METRICS.items()
    }
    rows = re.findall(r"^\| `(vllm:kvplug_\w+)", PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(scraped)
