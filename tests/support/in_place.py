"""A stand-in for the way in which AIBrix shortens a step, to compare ours with.

AIBrix replaces two methods of vLLM's first model runner when it is imported. What they do is written down here again,
compactly and in our own words, and is driven by type1's own worker and metadata: so only the way of shortening differs.

- Before everything else in `execute_model`, it has the connector load, by a method that connectors of vLLM don't have.
- In `_update_states`, it changes the scheduler's output in place, then calls the original, whose result is lost.
- It doesn't ask whether a request may be shortened, and leaves the list of blocks to be zeroed as it is.
- Ranks don't agree: that is left to what the connector loads.
- The second model runner stays as it is.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from support import llm as engine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm import LLM

#: The connector's method that loads, and returns the loaded tokens by request id.
LOAD = "start_load_kv_before_update"


def shorten_in_place(scheduler_output: Any, loaded: Mapping[str, int]) -> None:
    """Move loaded tokens from scheduled to computed, in the scheduler's output itself.

    Args:
        scheduler_output: vLLM's `SchedulerOutput`.
        loaded: By request id, the tokens of this step that were loaded.
    """
    scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens

    def take(request_id: str) -> int:
        count = loaded.get(request_id, 0)
        if count <= 0:
            return 0
        count = min(count, scheduled[request_id] - 1)
        scheduled[request_id] -= count
        scheduler_output.total_num_scheduled_tokens -= count
        return count

    for request in scheduler_output.scheduled_new_reqs:
        request.num_computed_tokens += take(request.req_id)
    cached = scheduler_output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        cached.num_computed_tokens[index] += take(request_id)


def replace_hook(llm: LLM) -> None:
    """Have a running engine shorten its steps that way, no longer ours.

    Args:
        llm: An engine with a connector, whose worker is in this process.
    """
    for name in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        if (module := sys.modules.get(name)) is not None:
            assert "before_update_states" in vars(module)
            vars(module)["before_update_states"] = lambda _runner, scheduler_output: scheduler_output
    connector = engine.connector(llm)
    if hasattr(connector, "worker"):
        setattr(connector, LOAD, lambda: connector.worker.load(connector._get_connector_metadata()))
    _replace_methods()


def _replace_methods() -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute_model, update_states = GPUModelRunner.execute_model, GPUModelRunner._update_states

    @functools.wraps(execute_model)
    def load_then_execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._loaded_in_place = {}
        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            connector.bind_connector_metadata(scheduler_output.kv_connector_metadata)
            self._loaded_in_place = getattr(connector, LOAD)()
        return execute_model(self, scheduler_output, *args, **kwargs)

    @functools.wraps(update_states)
    def shorten_then_update(self: Any, scheduler_output: Any) -> None:
        shorten_in_place(scheduler_output, self._loaded_in_place)
        update_states(self, scheduler_output)

    GPUModelRunner.execute_model = load_then_execute
    GPUModelRunner._update_states = shorten_then_update
