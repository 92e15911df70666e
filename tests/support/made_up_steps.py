"""Requests and steps of a made-up scheduler, with the fields of vLLM's classes that scheduler halves read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

__all__ = ["Request", "Table", "by_group", "output"]

#: A request's block ids: of the one KV-cache group, or a tuple of lists, one for each group.
Table = Sequence[int] | tuple[Sequence[int], ...]


class Request(SimpleNamespace):
    """Has the fields of vLLM's Request that are read."""

    def __init__(self, request_id: str, tokens: Sequence[int], **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "lora_request": None,
            "mm_features": [],
            "cache_salt": None,
            "prompt_embeds": None,
            "num_preemptions": 0,
        }
        super().__init__(
            request_id=request_id,
            all_token_ids=list(tokens),
            num_prompt_tokens=len(tokens),
            **(defaults | fields),
        )


def output(
    scheduled: dict[str, int],
    *,
    new: Sequence[tuple[str, int, Table]] = (),
    cached: Sequence[tuple[str, int, Table | None]] = (),
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
            block_ids=by_group(blocks),
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
            new_block_ids=[None if c[2] is None else by_group(c[2]) for c in cached],
            num_computed_tokens=[c[1] for c in cached],
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=drafts or {},
        finished_req_ids=set(finished),
        preempted_req_ids=preempted,
        **({"has_sync_kv_loads": False} | sync if sync or "old" not in flags else {}),
    )


def by_group(table: Table) -> tuple[list[int], ...]:
    """Return a table as vLLM has it: a list of block ids for each KV-cache group."""
    if isinstance(table, tuple) and table and not isinstance(table[0], int):
        return tuple(list(blocks) for blocks in table)
    return (list(table),)
