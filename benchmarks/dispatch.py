"""Cost of the patched line, in microseconds per step, beside that of an empty function call.

    python benchmarks/dispatch.py

Everything is measured in one run, on scheduler outputs made of vLLM's own classes; each figure is the best of several
repeats, which is what the code costs when nothing else is on the core.
"""

from __future__ import annotations

import argparse
import json
import timeit
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

import kvplug
from kvplug import dispatch

BLOCK = 16


class Runner(SimpleNamespace):
    """Stands in for a model runner."""


class Unhooked:
    """A connector without hooks."""


class Idle:
    """A connector with the hook that has nothing to load."""

    @kvplug.hookimpl
    def before_update_states(self, step: kvplug.Step) -> None:
        """Load nothing."""


class Loading:
    """A connector that loads half of every request, and reads each one to know how much that is."""

    @kvplug.hookimpl
    def before_update_states(self, step: kvplug.Step) -> dict[str, int]:
        """Say that half of each request is loaded."""
        return {name: request.num_scheduled_tokens // 2 for name, request in step.requests.items()}


def scheduler_output(num_requests: int, *, new: bool, candidates: tuple[str, ...] = ()) -> SchedulerOutput:
    """Make a step of decodes, or of prefills of 512 tokens."""
    ids = [f"request-{n}" for n in range(num_requests)]
    tokens = 512 if new else 1
    new_requests = [
        NewRequestData(
            req_id=request_id,
            prompt_token_ids=[1] * 8,
            mm_features=[],
            sampling_params=SimpleNamespace(prompt_logprobs=None),
            pooling_params=None,
            block_ids=(list(range(1, 1 + tokens // BLOCK)),),
            num_computed_tokens=0,
            lora_request=None,
        )
        for request_id in ids
    ]
    cached = CachedRequestData.make_empty()
    if not new:
        cached.req_ids = ids
        cached.new_block_ids = [([7],) if n % BLOCK == 0 else None for n in range(num_requests)]
        cached.num_computed_tokens = [100 + n for n in range(num_requests)]
        cached.num_output_tokens = [1] * num_requests
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = new_requests if new else []
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = dict.fromkeys(ids, tokens)
    output.total_num_scheduled_tokens = tokens * num_requests
    output.kv_connector_metadata = SimpleNamespace(candidates=candidates)
    return output


def measure(connector: Any, output: SchedulerOutput, repeats: int) -> float:
    """Return microseconds per call with a connector; None is no connector."""
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))
    sizes = {"pipeline_parallel_size": 1}
    runner = Runner(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**sizes)),
    )
    kv_transfer_state._KV_CONNECTOR_AGENT = connector  # noqa: SLF001
    dispatch.before_update_states(runner, output)
    number = 500
    times = timeit.repeat(lambda: dispatch.before_update_states(runner, output), number=number, repeat=repeats)
    return min(times) / number * 1e6


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="repeats per figure; the best one counts")
    repeats = parser.parse_args().repeats
    dispatch.compat.tensor_parallel_ranks = lambda: (0,)
    empty = min(timeit.repeat(lambda: None, number=100_000, repeat=repeats)) / 100_000 * 1e6
    everyone = tuple(f"request-{n}" for n in range(64))
    figures = {
        "empty_call_us": empty,
        "no_connector_us": measure(None, scheduler_output(1, new=False), repeats),
        "no_hooks_us": measure(Unhooked(), scheduler_output(64, new=False), repeats),
        "dispatch_us_idle": measure(Idle(), scheduler_output(1, new=False), repeats),
        "idle_64_decodes_us": measure(Idle(), scheduler_output(64, new=False), repeats),
        "dispatch_us_64": measure(Loading(), scheduler_output(64, new=True, candidates=everyone), repeats),
    }
    for name, value in figures.items():
        print(f"{name:20} {value:8.2f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
