"""Scheduler outputs made of vLLM's own classes, and what else the tests of the hook's side need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


def _new(request_id, computed, block_ids, *, prompt=(1, 2, 3), sampling=None, **kwargs):
    from vllm.v1.core.sched.output import NewRequestData

    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=None if prompt is None else list(prompt),
        mm_features=[],
        sampling_params=sampling or SimpleNamespace(prompt_logprobs=None),
        pooling_params=kwargs.pop("pooling", None),
        block_ids=block_ids if isinstance(block_ids, tuple) else (list(block_ids),),
        num_computed_tokens=computed,
        lora_request=None,
        **kwargs,
    )


def _output(
    scheduled, *, new=(), cached=(), resumed=(), finished=(), preempted=None, metadata=None, drafts=None, **kwargs
):
    """Build a SchedulerOutput.

    `new`: NewRequestData; `cached`: (request id, computed tokens, new block ids or None).
    """
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    def blocks(ids):
        return ids if ids is None or isinstance(ids, tuple) else (list(ids),)

    return SchedulerOutput(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[c[0] for c in cached],
            resumed_req_ids=set(resumed),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[blocks(c[2]) for c in cached],
            num_computed_tokens=[c[1] for c in cached],
            num_output_tokens=[0 for _ in cached],
        ),
        num_scheduled_tokens=dict(scheduled),
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=dict(drafts or {}),
        scheduled_encoder_inputs=kwargs.pop("encoder_inputs", {}),
        finished_req_ids=set(finished),
        free_encoder_mm_hashes=[],
        preempted_req_ids=None if preempted is None else set(preempted),
        kv_connector_metadata=metadata,
        **kwargs,
    )


@pytest.fixture
def new_request():
    """Make vLLM's NewRequestData: (request id, computed tokens, block ids)."""
    return _new


@pytest.fixture
def scheduler_output():
    """Make vLLM's SchedulerOutput: ({request id: scheduled tokens}, new=…, cached=…)."""
    return _output
