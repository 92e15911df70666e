"""Cost of the patched line, in microseconds per step."""

from __future__ import annotations

import timeit
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.common.figures import Figure

import kvplug

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["measure"]

_BLOCK = 16
_CHUNK = 512
_REQUESTS = 64
_CALLS = 5


class Runner(SimpleNamespace):
    """Stands in for a model runner."""


class Unhooked:
    """A connector without hooks."""


class Answering:
    """A connector whose hook answers from its metadata, as type1's does; the loads themselves aren't measured here."""

    @kvplug.hookimpl
    def before_update_states(self, step: kvplug.Step) -> Mapping[str, int]:
        """Say what the metadata says."""
        return dict.fromkeys(step.metadata.candidates, _CHUNK // 2)


class Reading:
    """A connector whose hook reads every request."""

    @kvplug.hookimpl
    def before_update_states(self, step: kvplug.Step) -> Mapping[str, int]:
        """Say that half of each request is loaded."""
        return {name: request.num_scheduled_tokens // 2 for name, request in step.requests.items()}


def measure(repeats: int) -> list[Figure]:
    """Measure the line with several connectors, on scheduler outputs made of vLLM's own classes."""
    one, many = _names(1), _names(_REQUESTS)
    decode, decodes = _step([], one, 1), _step([], many, 1)
    starts, unshortened = _step(many, [], _CHUNK, many), _step(many, [], _CHUNK)
    chunks = _step([], many, _CHUNK, many)
    cases = {
        f"{_REQUESTS} decodes": _us(Answering(), [decodes], repeats),
        f"{_REQUESTS} new requests, none shortened": _us(Answering(), [unshortened], repeats),
        f"{_REQUESTS} new requests, all shortened": _us(Answering(), [starts], repeats),
        f"{_REQUESTS} later chunks, all shortened": _us(Answering(), [unshortened, chunks], repeats),
    }
    best = f"best of {repeats}"

    def figure(name: str, value: float, detail: str, at_most: float | None = None) -> Figure:
        return Figure(name, value, "us", at_most=at_most, detail=f"{best}; {detail}")

    return [
        figure("dispatch_us_none", _us(None, [decode], repeats), "no connector"),
        figure("dispatch_us_unhooked", _us(Unhooked(), [decodes], repeats), "a connector without hooks"),
        figure("dispatch_us_idle", _us(Answering(), [decode], repeats), "one decode, no candidates", at_most=10),
        figure(
            "dispatch_us_64",
            max(cases.values()),
            "highest of " + ", ".join(f"{case}: {value:.1f}" for case, value in cases.items()),
            at_most=150,
        ),
        figure(
            "dispatch_us_64_reading",
            _us(Reading(), [starts], repeats),
            f"{_REQUESTS} new requests, all shortened by a hook that reads each one",
        ),
    ]


def _names(count: int) -> list[str]:
    return [f"request-{number}" for number in range(count)]


def _us(connector: Any, steps: list[SchedulerOutput], repeats: int) -> float:
    """Return microseconds of the line for the last of some steps, at best."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    from kvplug import compat, dispatch

    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=_BLOCK))
    runner = Runner(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1)),
    )
    compat.tensor_parallel_ranks = lambda: (0,)
    kv_transfer_state._KV_CONNECTOR_AGENT = connector  # noqa: SLF001
    for step in steps:
        output = dispatch.before_update_states(runner, step)
    expected = bool(getattr(step.kv_connector_metadata, "candidates", ())) and connector is not None
    if (output is not step) != expected:
        raise AssertionError("a step was shortened that has no candidates, or one wasn't that has")
    times = timeit.repeat(lambda: dispatch.before_update_states(runner, step), number=_CALLS, repeat=repeats)
    return min(times) / _CALLS * 1e6


def _step(new: list[str], running: list[str], num_tokens: int, candidates: Sequence[str] = ()) -> SchedulerOutput:
    """Make a step in which each request has as many tokens, and enough blocks."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=[1] * 8,
            mm_features=[],
            sampling_params=SimpleNamespace(prompt_logprobs=None),
            pooling_params=None,
            block_ids=(list(range(1, 1 + num_tokens // _BLOCK)),),
            num_computed_tokens=0,
            lora_request=None,
        )
        for name in new
    ]
    cached = CachedRequestData.make_empty()
    cached.req_ids = running
    # A decode needs a new block once in a while.
    cached.new_block_ids = [([7],) if number % _BLOCK == 0 else None for number in range(len(running))]
    cached.num_computed_tokens = [_CHUNK + number for number in range(len(running))]
    cached.num_output_tokens = [1] * len(running)
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = dict.fromkeys([*new, *running], num_tokens)
    output.total_num_scheduled_tokens = num_tokens * (len(new) + len(running))
    output.kv_connector_metadata = SimpleNamespace(candidates=tuple(candidates))
    return output
