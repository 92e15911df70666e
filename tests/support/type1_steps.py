"""Steps of a made-up scheduler for type1's scheduler half, with the fields of vLLM's classes that are read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvplug_type1.metadata import Type1Metadata
from kvplug_type1.scheduler import Type1Scheduler

#: Tokens per block.
BLOCK = 4


class Request(SimpleNamespace):
    """Has the fields of vLLM's Request that are read."""

    def __init__(self, request_id: str, tokens: Sequence[int], **fields: Any) -> None:
        defaults: dict[str, Any] = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
        super().__init__(
            request_id=request_id,
            all_token_ids=list(tokens),
            num_prompt_tokens=len(tokens),
            **(defaults | fields),
        )


def make(*, windowed: bool = False) -> Type1Scheduler:
    """Make a scheduler half without requests."""
    return Type1Scheduler(namespace=bytes(32), block_size=BLOCK, windowed=windowed)


def output(
    scheduled: dict[str, int],
    *,
    new: Sequence[tuple[str, int, Sequence[int]]] = (),
    cached: Sequence[tuple[str, int, Sequence[int] | None]] = (),
    resumed: Sequence[str] = (),
    finished: Sequence[str] = (),
    preempted: set[str] | None = None,
    drafts: dict[str, list[int]] | None = None,
    **flags: Any,
) -> SimpleNamespace:
    """Stand in for SchedulerOutput. `new` and `cached`: (request id, computed tokens, block ids)."""
    requests = [
        SimpleNamespace(
            req_id=request_id,
            num_computed_tokens=computed,
            block_ids=(list(blocks),),
            sampling_params=SimpleNamespace(prompt_logprobs=flags.get("prompt_logprobs")),
            pooling_params=None,
            prompt_token_ids=[1],
            prompt_embeds=None,
        )
        for request_id, computed, blocks in new
    ]
    sync = {"has_sync_kv_loads": flags["has_sync_kv_loads"]} if "has_sync_kv_loads" in flags else {}
    return SimpleNamespace(
        scheduled_new_reqs=requests,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[c[0] for c in cached],
            resumed_req_ids=set(resumed),
            new_block_ids=[None if c[2] is None else (list(c[2]),) for c in cached],
            num_computed_tokens=[c[1] for c in cached],
        ),
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens=drafts or {},
        finished_req_ids=set(finished),
        preempted_req_ids=preempted,
        **({"has_sync_kv_loads": False} | sync if sync or "old" not in flags else {}),
    )


def start(
    scheduler: Type1Scheduler,
    request: Request,
    blocks: Sequence[int],
    *,
    scheduled: int | None = None,
    computed: int = 0,
    local: int | None = None,
    **flags: Any,
) -> Type1Metadata:
    """Take a request through vLLM's lookup and its first step."""
    scheduler.track(request, computed if local is None else local)
    scheduler.track(request)
    scheduled = len(request.all_token_ids) - computed if scheduled is None else scheduled
    return scheduler.build_metadata(
        output({request.request_id: scheduled}, new=[(request.request_id, computed, blocks)], **flags)
    )
