"""The order in which vLLM's two model runners call the worker half of a connector, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["V1Lifecycle", "V2Lifecycle"]


class V1Lifecycle:
    """`KVConnectorModelRunnerMixin`, for the first runner.

    Args:
        connector: The worker half.
        deferred: Whether the end of saving waits for draft models, as it does with any speculative decoding.
    """

    def __init__(self, connector: Any, *, deferred: bool = False) -> None:
        self._connector, self._deferred = connector, deferred

    def before_update(self, scheduler_output: Any) -> None:
        """Before the runner takes in the scheduler's output."""
        self._connector.handle_preemptions(scheduler_output.kv_connector_metadata)

    def run(
        self,
        scheduler_output: Any,
        context: Any,
        forward: Callable[[], None] | None,
        load_options: Mapping[str, Any],  # noqa: ARG002 - the second runner's
    ) -> Any:
        """Run a step's forward pass, or none, and return vLLM's `KVConnectorOutput`."""
        connector = self._connector
        connector.bind_connector_metadata(scheduler_output.kv_connector_metadata)
        # Before 0.29 loads always start before the forward pass.
        loads_first = getattr(scheduler_output, "has_sync_kv_loads", True)
        deferred = self._deferred and forward is not None
        if loads_first:
            connector.start_load_kv(context)
        if forward is not None:
            forward()
        if not loads_first:
            connector.start_load_kv(context)
        if not deferred:
            connector.wait_for_save()
        output = _collect(connector, scheduler_output.finished_req_ids)
        if deferred:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return output


class V2Lifecycle:
    """`ActiveKVConnector`, for the second runner.

    Args:
        connector: The worker half.
    """

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    def before_update(self, scheduler_output: Any) -> None:
        """Nothing: this runner calls no connector before it has zeroed and copied blocks."""

    def run(
        self,
        scheduler_output: Any,
        context: Any,
        forward: Callable[[], None] | None,
        load_options: Mapping[str, Any],
    ) -> Any:
        """Run a step's forward pass, or none, and return vLLM's `KVConnectorOutput`."""
        connector, metadata = self._connector, scheduler_output.kv_connector_metadata
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        loads_first = getattr(scheduler_output, "has_sync_kv_loads", True)
        if loads_first:
            connector.start_load_kv(context, **load_options)
        if forward is not None:
            forward()
        if hasattr(connector, "finish_forward"):
            connector.finish_forward()
        if not loads_first:
            connector.start_load_kv(context, **load_options)
        connector.wait_for_save()
        output = _collect(connector, scheduler_output.finished_req_ids)
        connector.clear_connector_metadata()
        return output


def _collect(connector: Any, finished_req_ids: set[str]) -> Any:
    from vllm.v1.outputs import KVConnectorOutput

    output = KVConnectorOutput()
    if hasattr(connector, "get_transfer_results"):
        results = connector.get_transfer_results(finished_req_ids)
        output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
        output.failed_recving = results.failed_recving
    else:
        output.finished_sending, output.finished_recving = connector.get_finished(finished_req_ids)
    output.invalid_block_ids = connector.get_block_ids_with_load_errors()
    output.kv_connector_stats = connector.get_kv_connector_stats()
    output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
    if hasattr(connector, "build_connector_worker_meta"):
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
    return output
