"""A connector's counts on their way to vLLM's periodic log line and its `/metrics`.

This module imports vLLM: only connectors import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvplug.log import RateLimited, get_logger

__all__ = ["COUNTERS", "PER_RANK", "CounterPromMetrics", "CounterStats"]

_limited = RateLimited(get_logger(__name__))

#: Counts that reach `/metrics`, each as `vllm:kvplug_<name>_total`, with what they say.
COUNTERS: Mapping[str, str] = {
    "tokens_loaded": "Tokens whose KV was loaded into the paged cache.",
    "tokens_skipped": "Tokens that didn't have to be computed because their KV was loaded.",
    "blocks_looked_up": "Blocks that were looked up in the block store.",
    "blocks_hit": "Blocks that were found there.",
    "blocks_saved": "Blocks that were written to the block store.",
    "blocks_evicted": "Blocks that made room for others.",
    "saves_refused": "Blocks that found no room in the block store.",
    "load_errors": "Loads that failed; the tokens were computed.",
    "save_errors": "Saves that failed; the blocks weren't stored.",
    "plugin_errors": "Hook implementations that raised.",
    "hook_missed": "Steps with loads in which the hook wasn't called.",
}

#: Counts that differ from rank to rank. The others are about requests, the same on every tensor-parallel rank, and
#: only the first rank reports them: vLLM adds ranks up.
PER_RANK = frozenset({"load_errors", "save_errors", "plugin_errors", "hook_missed"})


@dataclass
class CounterStats(KVConnectorStats):  # type: ignore[misc]
    """What counts have grown by; adds up over steps and ranks."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or step's growth to this one's."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what is logged for the last interval."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Say whether nothing happened."""
        return not any(self.data.values())


class CounterPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus counters of `COUNTERS`.

    vLLM calls this in its API server, where an exception would end the server: whatever goes wrong is logged and the
    observation dropped.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the counters; see vLLM's base class."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter_class = metric_types[Counter]
        self._counters: dict[tuple[int, str], Any] = {}
        for name, documentation in COUNTERS.items():
            counter = counter_class(
                name=f"vllm:kvplug_{name}", documentation=f"kvplug: {documentation}", labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's growth of an engine's counts."""
        try:
            for name, amount in transfer_stats_data.items():
                counter = self._counters.get((engine_idx, name))
                if counter is not None and amount > 0:
                    counter.inc(amount)
        except Exception as error:  # noqa: BLE001 - see the class
            _limited.warning("observe", "kvplug's metrics couldn't be recorded: %r", error)
