"""Makes a release's own scheduler outputs from the steps of the scenario."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from matrixlib.scenario import PROMPTS, Blocks, Cached, New, Resumed, Step

__all__ = ["output_of"]

BlockCopy = namedtuple("BlockCopy", ("src_block_id", "dst_block_id"))  # noqa: PYI024 - like vLLM's

#: The first release whose scheduler tells of requests that a reset preempts.
_TELLS_OF_RESETS = Version("0.25.1")


def output_of(module: Any, step: Step, *, release: Version, runner: str, metadata: Any) -> Any:
    """Return a step as this release's scheduler sends it to a model runner.

    Args:
        module: vLLM's module with the classes.
        step: The step.
        release: vLLM's release.
        runner: `v1` or `v2`.
        metadata: The connector's metadata.

    """
    new = {name: request for name, request in step.requests.items() if _is_new(request, runner)}
    cached = {name: request for name, request in step.requests.items() if name not in new}
    scheduled = {name: request.scheduled for name, request in step.requests.items()}
    preempted = set() if step.reset and release < _TELLS_OF_RESETS else set(step.preempted)
    values: dict[str, Any] = {
        "scheduled_new_reqs": [_new(module, name, request, runner) for name, request in new.items()],
        "scheduled_cached_reqs": module.CachedRequestData(
            req_ids=list(cached),
            resumed_req_ids={name for name, request in cached.items() if isinstance(request, Resumed)},
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[_lists(_blocks(request)) for request in cached.values()],
            num_computed_tokens=[request.computed for request in cached.values()],
            num_output_tokens=[_outputs(name, request) for name, request in cached.items()],
        ),
        "num_scheduled_tokens": scheduled,
        "total_num_scheduled_tokens": sum(scheduled.values()),
        "scheduled_spec_decode_tokens": {name: [-1] * number for name, number in step.drafts.items()},
        "scheduled_encoder_inputs": {name: [0] for name in step.encoded},
        "num_common_prefix_blocks": [],
        "finished_req_ids": set(step.finished),
        "free_encoder_mm_hashes": [],
        "preempted_req_ids": preempted,
        "kv_connector_metadata": metadata,
        "new_block_ids_to_zero": list(step.zeroed) or None,
        "kv_cache_block_copies": [BlockCopy(9, block) for block in step.overwritten] or None,
    }
    return module.SchedulerOutput(**_known(module.SchedulerOutput, values))


def _is_new(request: New | Cached, runner: str) -> bool:
    return isinstance(request, New) and (runner == "v2" or not isinstance(request, Resumed))


def _new(module: Any, name: str, request: New | Cached, runner: str) -> Any:
    assert isinstance(request, New)
    prompt = list(range(PROMPTS[name]))
    outputs = [7] * (request.outputs if isinstance(request, Resumed) else 0)
    values = {
        "req_id": name,
        "prompt_token_ids": prompt,
        "mm_features": [],
        "sampling_params": SimpleNamespace(sampling_type="greedy", prompt_logprobs=None, max_tokens=100),
        "pooling_params": None,
        "block_ids": _lists(request.blocks),
        "num_computed_tokens": request.computed,
        "lora_request": None,
        "prefill_token_ids": prompt + outputs if runner == "v2" else None,
    }
    return module.NewRequestData(**_known(module.NewRequestData, values))


def _known(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return those values that this release's dataclass has fields for."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def _blocks(request: New | Cached) -> Blocks | None:
    return request.new_blocks if isinstance(request, Cached) else request.blocks


def _lists(blocks: Blocks | None) -> tuple[list[int], ...] | None:
    return None if blocks is None else tuple(map(list, blocks))


def _outputs(name: str, request: New | Cached) -> int:
    return request.outputs if isinstance(request, Resumed) else max(0, request.computed + 1 - PROMPTS[name])
