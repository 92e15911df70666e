"""A connector's stats on their way to vLLM's periodic log line and its `/metrics`.

What workers and the scheduler half count in a step travels in vLLM's own `KVConnectorStats`: ranks are added up, then
each step is logged and observed in the API server. Nothing here raises: an exception would end the engine, or the API
server's output loop.

A step's stats are a flat dict of plain values, by name of the metric (`name:value` where it has a label):

- a number: what a counter has grown by,
- a list of numbers: values for a histogram,
- a dict from rank to number: what a gauge is at, in that rank.

This module imports vLLM: only connectors import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvplug.log import RateLimited, get_logger

__all__ = ["METRICS", "ConnectorPromMetrics", "ConnectorStats", "Metric", "MetricsMixin", "of_every_rank"]

logger = get_logger(__name__)
_limited = RateLimited(logger)

#: Bounds of the histograms of durations, in seconds: from a lookup to a copy of many gigabytes.
SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Metric:
    """One metric; on `/metrics` it is `vllm:kvplug_<name>`, with `_total` at the end if it is a counter.

    Attributes:
        kind: Counter, gauge, or a histogram of seconds.
        documentation: What it says, as Prometheus shows it.
        label: Name of its own label, beside vLLM's.
        every_rank: Whether each tensor-parallel rank has its own, and all are added up. The others are about tokens
            and requests, the same on all ranks, and only the first one reports them.

    """

    kind: Literal["counter", "gauge", "seconds"]
    documentation: str
    label: str | None = None
    every_rank: bool = False


def _counter(documentation: str, *, label: str | None = None, every_rank: bool = False) -> Metric:
    return Metric("counter", documentation, label, every_rank)


def _l2(kind: Literal["counter", "gauge"], documentation: str, *, every_rank: bool = False) -> Metric:
    return Metric(kind, documentation, "tier", every_rank)


#: All metrics, by name. docs/metrics.md has them, too.
METRICS: Mapping[str, Metric] = {
    "prefix_cache_queries": _counter("Prompt tokens that vLLM's own prefix cache didn't have and that were looked up."),
    "prefix_cache_hits": _counter("Prompt tokens that didn't have to be computed because their KV was loaded."),
    "requests_looked_up": _counter("Requests whose blocks were looked up."),
    "requests_hit": _counter("Requests that had at least one token less to compute."),
    "requests_announced": _counter("Waiting requests that the workers were told of before their first step."),
    "blocks_looked_up": _counter("Blocks that were looked up in the block store."),
    "blocks_hit": _counter("Blocks that were found there."),
    "blocks_loaded": _counter("Blocks that were copied into the paged cache."),
    "blocks_saved": _counter("Blocks that were written to the block store."),
    "blocks_evicted": _counter("Blocks that made room for others."),
    "saves_refused": _counter("Blocks that found no room in the block store."),
    "tokens_loaded": _counter("Tokens whose KV was loaded into the paged cache."),
    "tokens_skipped": _counter("Tokens that weren't computed because their KV was loaded, over all hooks."),
    "tokens_saved": _counter("Tokens whose KV was written to the block store."),
    "loaded_bytes": _counter("Bytes that were copied into the paged cache, over all ranks.", every_rank=True),
    "saved_bytes": _counter("Bytes that were copied to the block store, over all ranks.", every_rank=True),
    "load_seconds": Metric("seconds", "A step's loads: host time of lookups and copies, per rank.", every_rank=True),
    "save_seconds": Metric("seconds", "A step's saves: host time of lookups and copies, per rank.", every_rank=True),
    "hook_seconds": Metric(
        "seconds", "All hooks of a step that had something to load, agreement included, per rank.", every_rank=True
    ),
    "vetoes": _counter("Requests that were not shortened although KV was loaded, by reason.", label="reason"),
    "overwrite_wait_seconds": Metric(
        "seconds", "What a step waited for saves of blocks that it overwrites, per rank.", every_rank=True
    ),
    "load_errors": _counter("Loads that failed; the tokens were computed.", every_rank=True),
    "save_errors": _counter("Saves that failed; the blocks weren't stored.", every_rank=True),
    "plugin_errors": _counter("Hook implementations that raised.", every_rank=True),
    "hook_missed": _counter("Steps with loads in which the hook wasn't called.", every_rank=True),
    "l2_lookups": _l2("counter", "Blocks that were looked up in an L2 tier."),
    "l2_hits": _l2("counter", "Blocks that a lookup found there."),
    "l2_blocks_read": _l2("counter", "Blocks that were read from there, whole and undamaged."),
    "l2_blocks_written": _l2("counter", "Blocks that were written there."),
    "l2_read_bytes": _l2("counter", "Bytes that were read from there, over all ranks.", every_rank=True),
    "l2_written_bytes": _l2("counter", "Bytes that were written there, over all ranks.", every_rank=True),
    "l2_writes_dropped": _l2(
        "counter", "Blocks that weren't written because too much was on its way, or the tier failed.", every_rank=True
    ),
    "l2_writes_refused": _l2("counter", "Blocks that the tier had no room for.", every_rank=True),
    "l2_damaged": _l2("counter", "Blocks that were read and aren't what was asked for, or damaged.", every_rank=True),
    "l2_errors": _l2("counter", "Calls to the tier that failed.", every_rank=True),
    "l2_timeouts": _l2("counter", "Calls to the tier that took too long.", every_rank=True),
    "l2_dropped": _l2("counter", "Calls to the tier whose turn didn't come in time.", every_rank=True),
    "l2_skipped": _l2("counter", "Calls that weren't made because the tier fails.", every_rank=True),
    "l2_down": _l2("gauge", "Ranks that leave the tier alone because it fails.", every_rank=True),
    "l2_usage_bytes": _l2("gauge", "Bytes that the tier holds, where it knows."),
    "l2_capacity_bytes": _l2("gauge", "Bytes that the tier can hold, where it knows."),
    "l2_prefetched": _counter("Blocks that were asked for from L2 before their request was scheduled."),
    "l2_prefetches_dropped": _counter("Blocks that weren't, because too much was on its way."),
    "l2_load_timeouts": _counter("Requests that waited for L2 until their time was up.", every_rank=True),
    "l2_wait_seconds": Metric("seconds", "What a request's step waited for L2, per rank.", every_rank=True),
    "handovers": _counter("Requests that were prefilled by another engine."),
    "handover_tokens_computed": _counter("Prompt tokens of such requests that were computed here: one, if all came."),
    "handover_timeouts": _counter("Such requests that waited for what wasn't stored in time."),
    "handovers_refused": _counter("Such requests that weren't waited for, by reason.", label="reason"),
    "handover_wait_seconds": Metric("seconds", "What such requests waited for the store."),
    "l1_usage_bytes": Metric("gauge", "Host memory that holds blocks, over all ranks.", every_rank=True),
    "l1_capacity_bytes": Metric("gauge", "Host memory for blocks, over all ranks.", every_rank=True),
}


def of_every_rank(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what every rank reports: what a rank other than the first has to say."""
    return {
        name: value
        for name, value in stats.items()
        if (metric := METRICS.get(name.partition(":")[0])) is not None and metric.every_rank
    }


def _merge(mine: Any, other: Any) -> Any:
    """Add two values of one metric: numbers up, observations together, gauges rank by rank, the later one counts."""
    if isinstance(other, dict):
        return {**mine, **other}
    return mine + other


@dataclass
class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """What is new in a step, or in several, on one rank or on all."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's stats, or a later step's, to these."""
        for name, value in other.data.items():
            self._add(name, value)
        return self

    def _add(self, name: str, value: Any) -> None:
        try:
            self.data[name] = _merge(self.data[name], value) if name in self.data else value
        except Exception as error:  # noqa: BLE001 - values come from other processes, and this runs in the scheduler
            _limited.warning(("aggregate", name), "kvplug's metric %s couldn't be added up: %r", name, error)

    def reduce(self) -> dict[str, int | float]:
        """Return what is logged for the last interval: sums, means in milliseconds, and what gauges are at."""
        line: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, dict):
                line[name] = sum(value.values())
            elif isinstance(value, list):
                line[f"{name.removesuffix('_seconds')}_mean_ms"] = round(fmean(value) * 1e3, 3) if value else 0
            else:
                line[name] = value
        return line

    def is_empty(self) -> bool:
        """Say whether nothing happened. Gauges alone are nothing."""
        return not any(value for value in self.data.values() if not isinstance(value, dict))


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`METRICS` on vLLM's `/metrics`.

    vLLM makes and calls this in its API server, where an exception would end the server: what goes wrong is logged, and
    what can't be registered is left out. It is never None either: `MultiConnector` asserts that a child that reports
    stats has metrics.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the metrics; see vLLM's base class."""
        self._collectors: dict[str, Any] = {}
        self._labelvalues = per_engine_labelvalues
        self._children: dict[tuple[int, str], Any] = {}
        self._gauges: dict[tuple[int, str], dict[Any, float]] = {}
        try:
            super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        except Exception:
            logger.exception("kvplug: vLLM's connector metrics couldn't be set up")
        for name, metric in METRICS.items():
            self._register(name, metric, metric_types, labelnames)

    def _register(self, name: str, metric: Metric, metric_types: dict[type, type], labelnames: list[str]) -> None:
        try:
            self._collectors[name] = _collector(name, metric, metric_types, labelnames)
            if metric.kind == "counter" and metric.label is None:  # so that a scrape finds it at 0
                for engine in self._labelvalues:
                    self._child(engine, name)
        except Exception:
            logger.exception("kvplug: metric %s couldn't be registered", name)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record a step's stats of an engine."""
        try:
            items = list(transfer_stats_data.items())
        except Exception as error:  # noqa: BLE001 - see the class
            _limited.warning("observe", "kvplug's metrics couldn't be recorded: %r", error)
            return
        for key, value in items:
            self._observe(engine_idx, key, value)

    def _observe(self, engine: int, key: str, value: Any) -> None:
        try:
            self._record(engine, key, value)
        except Exception as error:  # noqa: BLE001 - see the class
            _limited.warning(("observe", key), "kvplug's metric %s couldn't be recorded: %r", key, error)

    def _record(self, engine: int, key: str, value: Any) -> None:
        name = key.partition(":")[0]
        if name not in self._collectors or engine not in self._labelvalues:
            return
        child = self._child(engine, key)
        match METRICS[name].kind:
            case "counter":
                if value > 0:  # Prometheus refuses the rest
                    child.inc(value)
            case "seconds":
                for seconds in value:
                    child.observe(seconds)
            case "gauge":
                ranks = self._gauges.setdefault((engine, key), {})
                ranks.update(value)
                child.set(sum(ranks.values()))

    def _child(self, engine: int, key: str) -> Any:
        """Return the metric with an engine's labels, and with its own label's value if it has one."""
        child = self._children.get((engine, key))
        if child is None:
            name, _, own = key.partition(":")
            values = [*self._labelvalues[engine], own] if METRICS[name].label else self._labelvalues[engine]
            child = self._children[engine, key] = self._collectors[name].labels(*values)
        return child


class MetricsMixin:
    """What a connector of ours needs so that vLLM takes its stats: to be put before vLLM's base class."""

    @staticmethod
    def stats_of_rank(new: dict[str, Any], gauges: Mapping[str, float], rank: int) -> dict[str, Any]:
        """Return what a worker reports: its counts and observations, and its gauges under its rank.

        Args:
            new: What is new since the last call, by name. Only the first rank reports what all ranks count alike.
            gauges: What gauges are at, if that has changed.
            rank: The worker's rank in its tensor-parallel group.

        """
        new = new | {name: {rank: value} for name, value in gauges.items()}
        return new if rank == 0 else of_every_rank(new)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Rebuild stats that came from a worker; see vLLM's base class."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        """Register the metrics; see vLLM's base class."""
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _collector(name: str, metric: Metric, metric_types: dict[type, type], labelnames: list[str]) -> Any:
    """Make a metric of vLLM's own classes, or find the one that another connector of this process has made."""
    arguments: dict[str, Any] = {
        "name": f"vllm:kvplug_{name}",
        "documentation": f"kvplug: {metric.documentation}",
        "labelnames": [*labelnames, metric.label] if metric.label else labelnames,
    }
    base: type = {"counter": Counter, "gauge": Gauge, "seconds": Histogram}[metric.kind]
    if metric.kind == "gauge":
        arguments["multiprocess_mode"] = "mostrecent"
    elif metric.kind == "seconds":
        arguments["buckets"] = list(SECONDS)
    try:
        return metric_types[base](**arguments)
    except ValueError:
        known = getattr(REGISTRY, "_names_to_collectors", {}).get(arguments["name"])
        if known is None:
            raise
        return known
