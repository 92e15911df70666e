"""What the scheduler sends to the workers."""

from __future__ import annotations

from matrixlib.checks import All, InOrder, Says
from matrixlib.fact import Fact, fields

__all__ = ["FACTS"]

_OUTPUT = "vllm/v1/core/sched/output.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"

_FIELDS = (
    *fields(
        _OUTPUT,
        "SchedulerOutput",
        "kvplug.compat",
        "scheduled_new_reqs: list[NewRequestData]",
        "scheduled_cached_reqs: CachedRequestData",
        "num_scheduled_tokens: dict[str, int]",
        "total_num_scheduled_tokens: int",
        "scheduled_spec_decode_tokens: dict[str, list[int]]",
        "scheduled_encoder_inputs: dict[str, list[int]]",
        "finished_req_ids: set[str]",
        "preempted_req_ids: set[str] | None = None",
        "kv_connector_metadata: KVConnectorMetadata | None = None",
        ("new_block_ids_to_zero: list[int] | None = None", "0.17.1"),
        ("kv_cache_block_copies: list[KVCacheBlockCopy] | None = None", "0.26.0"),
        ("has_sync_kv_loads: bool = False", "0.29.0"),
        ("block_table_updates: dict[str, tuple[list[int], ...]] | None = None", "0.30.0", "0.32.0"),
    ),
    *fields(
        _OUTPUT,
        "NewRequestData",
        "kvplug.requests",
        "req_id: str",
        "prompt_token_ids: list[int] | None",
        "sampling_params: SamplingParams | None",
        "pooling_params: PoolingParams | None",
        "block_ids: tuple[list[int], ...]",
        "num_computed_tokens: int",
        "prompt_embeds: 'torch.Tensor | None' = None",
        ("replay_start: int = 0", "0.31.0"),
    ),
    *fields(
        _OUTPUT,
        "CachedRequestData",
        "kvplug.requests",
        "req_ids: list[str]",
        "resumed_req_ids: set[str]",
        "new_block_ids: list[tuple[list[int], ...] | None]",
        "num_computed_tokens: list[int]",
    ),
    *fields(
        "vllm/sampling_params.py", "SamplingParams", "kvplug.compat.static_vetoes", "prompt_logprobs: int | None = None"
    ),
    Fact(
        "a block copy names the block that it overwrites",
        Says("vllm/v1/core/kv_cache_utils.py", "KVCacheBlockCopy", "dst_block_id: int"),
        "kvplug.compat.shortened_output",
        since="0.26.0",
    ),
)

_SCHEDULING = (
    Fact(
        "a step names the requests that were preempted while it was planned",
        Says(_SCHEDULER, "Scheduler.schedule", "{req.request_id for req in preempted_reqs}"),
        "kvplug.requests, which finds other preemptions when the requests resume,",
        until="0.25.1",
    ),
    Fact(
        "a step names all requests that were preempted since the one before",
        All(
            (
                Says(_SCHEDULER, "Scheduler._preempt_request", "self.reset_preempted_req_ids.add(request.request_id)"),
                Says(_SCHEDULER, "Scheduler._update_after_schedule", "self.reset_preempted_req_ids = set()"),
            )
        ),
        "kvplug.requests",
        since="0.25.1",
    ),
    Fact(
        "the first runner gets resumed requests among the cached ones",
        Says(_SCHEDULER, "Scheduler._make_cached_request_data", "resumed_req_ids.add(req_id)"),
        "kvplug.requests",
        runners=("v1",),
    ),
    Fact(
        "the second runner gets resumed requests among copied new ones",
        Says(_SCHEDULER, "Scheduler.schedule", "scheduled_new_reqs + scheduled_resumed_reqs"),
        "kvplug.requests",
        until="0.24.0",
        runners=("v2",),
    ),
    Fact(
        "the second runner gets resumed requests among the new ones",
        Says(_SCHEDULER, "Scheduler.schedule", "scheduled_new_reqs.extend(scheduled_resumed_reqs)"),
        "kvplug.requests",
        since="0.24.0",
        runners=("v2",),
    ),
    Fact(
        "metadata is built from a complete step, before the scheduler's own counts move on",
        InOrder(
            _SCHEDULER,
            "Scheduler.schedule",
            (
                "SchedulerOutput(...)",
                "scheduler_output.kv_connector_metadata = meta",
                "self._update_after_schedule(scheduler_output)",
            ),
        ),
        "kvplug_type1.scheduler",
    ),
)

FACTS = _FIELDS + _SCHEDULING
