"""What type2's scheduler half takes per step, for made-up steps of vLLM's own classes."""

from __future__ import annotations

import gc
import random
import time
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.common.figures import Figure, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplug.scheduled.metadata import StepMetadata
    from kvplug.scheduled.scheduler import SchedulerHalf

__all__ = ["measure"]

_BLOCK = 16

#: Steps before those that count.
_FIRST_STEPS = 2 * _BLOCK

#: What short prompts are, to compare long ones with.
_SHORT = 4096


class _Request(SimpleNamespace):
    """Has the fields of vLLM's Request that are read."""

    def __init__(self, request_id: str, tokens: list[int]) -> None:
        super().__init__(
            request_id=request_id,
            all_token_ids=tokens,
            num_prompt_tokens=len(tokens),
            num_preemptions=0,
            lora_request=None,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
            skip_reading_prefix_cache=False,
            sampling_params=SimpleNamespace(prompt_logprobs=None),
            pooling_params=None,
        )


def measure(steps: int, num_requests: int, num_tokens: int) -> list[Figure]:
    """Measure steps in which as many requests decode, and as many wait.

    Args:
        steps: Steps that count.
        num_requests: Requests that run, and requests that wait.
        num_tokens: Tokens of each prompt.

    """
    short = _Steps(num_requests, _SHORT)
    of_short = short.head_asked(steps)
    del short
    gc.collect()
    long = _Steps(num_requests, num_tokens)
    idle = long.nobody_asked(steps)
    head = long.head_asked(steps)
    every = long.all_asked(steps)
    admitted = long.first_asked
    kinds = f"{num_requests} requests of {num_tokens} tokens run, and as many wait"
    return [
        Figure(
            "scheduler_us_256x32k",
            median(head) * 1e6,
            "us",
            at_most=300,
            detail=f"{_detail(head)}; {kinds}: vLLM asks for the first of them",
        ),
        Figure(
            "scheduler_us_256x32k_over_4k",
            median(head) / median(of_short),
            detail=f"the same over {_detail(of_short)} with prompts of {_SHORT} tokens",
        ),
        Figure(
            "scheduler_us_256x32k_none_asked",
            median(idle) * 1e6,
            "us",
            detail=f"{_detail(idle)}; it asks for none, since no more may run",
        ),
        Figure(
            "scheduler_us_256x32k_all_asked",
            median(every) * 1e6,
            "us",
            detail=f"{_detail(every)}; it asks for all {num_requests} in each step",
        ),
        Figure(
            "scheduler_us_32k_first_asked",
            median(admitted) * 1e6,
            "us",
            detail=f"{spread(admitted, 1e6)} us when a request is asked for the first time: keys, lookup and pins",
        ),
    ]


def _detail(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"{spread(seconds, 1e6)} us, p99 {ordered[int(0.99 * len(ordered))] * 1e6:.3g}"


class _Steps:
    """A scheduler half in the middle of its work: all slots are used, so that each save evicts a block.

    Each request that runs gets a token per step, and in each step one in as many as a block has tokens fills one. All
    that wait have the same prompt but for its last block, and it is stored.
    """

    def __init__(self, num_requests: int, num_tokens: int) -> None:
        from kvplug.kv_groups import KVGroup
        from kvplug.scheduled.metadata import SlabHandshake
        from kvplug.scheduled.scheduler import SchedulerHalf
        from kvplug_type2.settings import Type2Settings

        group = KVGroup(
            index=0, kind="full", block_size=_BLOCK, window=0, every_block=False, page_size_bytes={"layer": 1}
        )
        self._scheduler: SchedulerHalf = SchedulerHalf(
            Type2Settings.load({"l1_size_per_rank": "1GiB"}, {}),
            namespace=bytes(32),
            groups=(group,),
            num_ranks=1,
            drop_last_hit=False,
        )
        # As many as one prompt and the running requests' blocks of all steps that are measured.
        self._scheduler.set_slab(SlabHandshake(3 * num_tokens // _BLOCK + 16 * num_requests, 1 << 20))
        generator = random.Random(0)  # noqa: S311
        self._tokens = [generator.randrange(150_000) for _ in range(num_tokens)]
        self._next_block = 1
        self._waiting = [self._request(f"waiting-{number}", number, last=True) for number in range(num_requests)]
        # Staggered, so that as many fill a block in each step.
        self._running = [self._request(f"running-{number}", number) for number in range(num_requests)]
        for number, request in enumerate(self._running):
            request.all_token_ids += self._tokens[: number % _BLOCK]
        self._start(self._running)
        self._run_once(self._request("stored", num_requests, last=True))
        for _ in range(_FIRST_STEPS):
            self._decode([])
        # What has been made is here to stay. vLLM's engine does the same when it has started.
        gc.collect()
        gc.freeze()
        #: Seconds for each waiting request when it is asked for the first time.
        self.first_asked = [self._ask([request]) for request in self._waiting]
        if not self._hits:
            raise AssertionError("nothing was promised")

    def nobody_asked(self, steps: int) -> list[float]:
        """Return the seconds of steps in which vLLM asks for no request that waits."""
        return [self._decode([]) for _ in range(steps)]

    def head_asked(self, steps: int) -> list[float]:
        """Return the seconds of steps in which vLLM asks for the first request that waits, and can't admit it."""
        return [self._decode(self._waiting[:1]) for _ in range(steps)]

    def all_asked(self, steps: int) -> list[float]:
        """Return the seconds of steps in which vLLM asks for each request that waits."""
        return [self._decode(self._waiting) for _ in range(steps)]

    def _request(self, request_id: str, number: int, *, last: bool = False) -> _Request:
        """Make a request that differs from the others from its first block on, or only in its last one."""
        tokens = self._tokens.copy()
        tokens[-1 if last else 0] = 200_000 + number
        return _Request(request_id, tokens)

    def _blocks(self, count: int) -> list[int]:
        self._next_block += count
        return list(range(self._next_block - count, self._next_block))

    def _ask(self, requests: Sequence[_Request]) -> float:
        match = self._scheduler.match
        start = time.thread_time()
        for request in requests:
            promised, _ = match(request, 0)
        seconds = time.thread_time() - start
        self._hits = bool(promised)
        return seconds

    def _report(self, metadata: StepMetadata) -> None:
        from kvplug.scheduled.metadata import WorkerReport

        saves = {save.number: (1, False) for save in metadata.saves}
        self._scheduler.take_report(WorkerReport(saves=saves))

    def _start(self, requests: Sequence[_Request]) -> None:
        """Compute prompts, one per step."""
        for request in requests:
            self._scheduler.match(request, 0)
            self._scheduler.admit(request, ([],), 0)
            self._report(self._scheduler.build_metadata(self._prefill(request)))

    def _run_once(self, request: _Request) -> None:
        self._start([request])
        self._scheduler.finish(request)

    def _prefill(self, request: _Request) -> Any:
        from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

        tokens = len(request.all_token_ids)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=[],
                mm_features=[],
                sampling_params=request.sampling_params,
                pooling_params=None,
                block_ids=(self._blocks(-(-tokens // _BLOCK)),),
                num_computed_tokens=0,
                lora_request=None,
            )
        ]
        output.num_scheduled_tokens = {request.request_id: tokens}
        output.total_num_scheduled_tokens = tokens
        return output

    def _decode(self, asked: Sequence[_Request]) -> float:
        """Let each request that runs compute the next token, and return the seconds of the scheduler half."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        from kvplug.scheduled.metadata import WorkerReport

        # Each has its last token computed in this step, and the next one is known after it.
        computed = [len(request.all_token_ids) for request in self._running]
        for request in self._running:
            request.all_token_ids.append(7)
        cached = CachedRequestData.make_empty()
        cached.req_ids = [request.request_id for request in self._running]
        cached.num_computed_tokens = computed
        cached.new_block_ids = [None if tokens % _BLOCK else (self._blocks(1),) for tokens in computed]
        cached.num_output_tokens = [1] * len(computed)
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = dict.fromkeys(cached.req_ids, 1)
        output.total_num_scheduled_tokens = len(computed)
        scheduler = self._scheduler

        seconds = self._ask(asked) if asked else 0.0
        start = time.thread_time()
        metadata = scheduler.build_metadata(output)
        seconds += time.thread_time() - start
        # Workers tell of the saves a step later.
        report = WorkerReport(saves={save.number: (1, False) for save in metadata.saves})
        start = time.thread_time()
        scheduler.take_report(report)
        scheduler.take_stats()
        scheduler.has_pending_work()
        seconds += time.thread_time() - start
        filled = sum((tokens + 1) % _BLOCK == 0 for tokens in computed)
        saved = sum(len(part.block_ids) for save in metadata.saves for part in save.parts)
        if saved != filled:
            msg = f"{saved} blocks were saved, and {filled} were full"
            raise AssertionError(msg)
        return seconds
