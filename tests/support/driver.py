"""A job that takes one engine through a script, for comparing an engine with a connector to one without.

plain = engines.run(drive, model=…, script=[Generate(prompts)])
ours = engines.run(drive, model=…, connector=TYPE1, script=[Generate(prompts), ResetLocal(), Generate(prompts)])
compare(ours.rounds[1].outputs, plain.rounds[0].outputs)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from support import llm as engine
from support.llm import Embedded, Output
from support.stored import Stored, adopt, corrupt, put, take

#: A `kv_transfer_config` as a user would write it, with little memory.
TYPE1: dict[str, Any] = {
    "kv_connector": "Type1Connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"l1_size_per_rank": "64MiB"},
}


def type1(**settings: Any) -> dict[str, Any]:
    """Return `TYPE1` with other settings."""
    return TYPE1 | {"kv_connector_extra_config": TYPE1["kv_connector_extra_config"] | settings}


#: The same for type2.
TYPE2: dict[str, Any] = TYPE1 | {"kv_connector": "Type2Connector"}


def type2(**settings: Any) -> dict[str, Any]:
    """Return `TYPE2` with other settings."""
    return TYPE2 | {"kv_connector_extra_config": TYPE2["kv_connector_extra_config"] | settings}


#: The same for pd_reuse. It needs a store that other engines reach, too.
PD_REUSE: dict[str, Any] = TYPE1 | {"kv_connector": "PDReuseConnector"}

#: What vllm-router puts into a request for a prefill engine.
PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
}


def pd_reuse(**settings: Any) -> dict[str, Any]:
    """Return `PD_REUSE` with other settings: everything is worth loading, and nothing times out on a busy machine."""
    patient = {"min_reuse_tokens": 1, "handover_timeout": 30, "l2_load_timeout": 30, "l2_timeout": 60}
    return PD_REUSE | {"kv_connector_extra_config": PD_REUSE["kv_connector_extra_config"] | patient | settings}


@dataclass(frozen=True)
class Generate:
    """Generate for some prompts at once; see `support.llm.generate`."""

    prompts: Sequence[Sequence[int] | Embedded]
    max_tokens: int = 8
    lora: tuple[int, str] | None = None
    salt: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    each: Sequence[dict[str, Any]] | None = None


def handed_over(params: dict[str, Any] | None) -> dict[str, Any]:
    """Return the sampling arguments of a request with these `kv_transfer_params`."""
    return {"extra_args": {"kv_transfer_params": params}}


def prefill(prompts: Sequence[Sequence[int]], **rest: Any) -> Generate:
    """Return a step that prefills prompts for another engine, which finds the parameters in its `Round`."""
    return Generate(prompts, 1, sampling=handed_over(PREFILL) | rest.pop("sampling", {}), **rest)


def decode(
    prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any] | None], max_tokens: int, **rest: Any
) -> Generate:
    """Return a step that goes on with prompts that another engine has prefilled, given its answers' parameters."""
    return Generate(prompts, max_tokens, each=[handed_over(own) for own in params], **rest)


@dataclass(frozen=True)
class OneByOne:
    """Generate for some prompts, each alone."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int = 8


@dataclass(frozen=True)
class ResetLocal:
    """Empty vLLM's own prefix cache."""


@dataclass(frozen=True)
class ResetAll:
    """Empty vLLM's own prefix cache and the connector's store."""


@dataclass(frozen=True)
class Corrupt:
    """Spoil the blocks in the connector's L1: the negative control of an equality test."""

    #: Only layers whose names start with this.
    layers: str = ""


@dataclass(frozen=True)
class Take:
    """Keep what is in the connector's L1 for the `Result`."""


@dataclass(frozen=True)
class Put:
    """Put another engine's blocks into the connector's L1, under that engine's keys."""

    stored: Stored


@dataclass(frozen=True)
class Adopt:
    """Let requests have another engine's keys from now on: the control of tests that keys tell engines apart."""

    stored: Stored


@dataclass(frozen=True)
class Abort:
    """Start requests, take some steps, and abort them."""

    prompts: Sequence[Sequence[int]]
    num_steps: int = 1


@dataclass(frozen=True)
class Round:
    """What came of one `Generate` or `OneByOne`."""

    outputs: list[Output]
    #: What the connector's and the dispatcher's counts grew by.
    counts: Counter[str]
    #: Tokens that speculative decoding drafted, and those of them that were accepted.
    drafts: Counter[str] = field(default_factory=Counter)
    #: The answers' `kv_transfer_params`.
    params: list[dict[str, Any] | None] = field(default_factory=list)
    #: What clients are told of each prompt: its tokens that weren't computed.
    cached: list[int | None] = field(default_factory=list)
    #: Tokens in vLLM's steps: of prompts, those that were computed; of outputs, all but the last.
    num_scheduled: int = 0


@dataclass(frozen=True)
class Result:
    """What a script left behind."""

    rounds: list[Round]
    #: Preemptions over the whole script.
    preemptions: int
    #: State that must be 0 when nothing is running.
    leftovers: dict[str, int]
    #: What was in the connector's L1 at each `Take`.
    stored: list[Stored] = field(default_factory=list)


def drive(
    *,
    model: str,
    script: Sequence[Any],
    connector: dict[str, Any] | None = None,
    asynchronous: bool = False,
    **engine_args: Any,
) -> Result:
    """Start an engine and take it through a script.

    `asynchronous` forces asynchronous scheduling, which vLLM switches off on CPUs: the next step is scheduled before
    the results of this one are known.
    """
    if asynchronous:
        keep_asynchronous_scheduling()
    llm = engine.make_llm(model, connector=connector, **engine_args)
    assert asynchronous == (type(engine.scheduler(llm)).__name__ == "AsyncScheduler")
    preemptions, drafts = count_preemptions(llm), count_drafts(llm)
    answers, scheduled = keep_answers(llm), count_scheduled(llm)
    rounds = []
    taken = []
    for operation in script:
        if isinstance(operation, Take):
            taken.append(take(llm))
            continue
        before = counts(llm) if connector else Counter()
        for seen in (drafts, answers, scheduled):
            seen.clear()
        outputs = perform(llm, operation)
        if outputs is not None:
            grown = counts(llm) if connector else Counter()
            grown.subtract(before)
            params, cached = (
                [getattr(a, name) for a in answers] for name in ("kv_transfer_params", "num_cached_tokens")
            )
            rounds.append(Round(outputs, grown, Counter(drafts), params, cached, sum(scheduled)))
    return Result(rounds, len(preemptions), leftovers(llm) if connector else {}, taken)


def keep_asynchronous_scheduling() -> None:
    """Let engines made from now on in this process use asynchronous scheduling, which vLLM switches off on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    inner = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        inner(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def perform(llm: Any, operation: Any) -> list[Output] | None:
    """Do one operation of a script; return what it generated, if it generates."""
    match operation:
        case Generate(prompts, max_tokens, lora, salt, sampling, each):
            return engine.generate(llm, prompts, max_tokens, lora=lora, salt=salt, each=each, **sampling)
        case OneByOne(prompts, max_tokens):
            return [engine.generate(llm, [prompt], max_tokens)[0] for prompt in prompts]
        case ResetLocal():
            engine.reset_local_cache(llm)
        case ResetAll():
            engine.finish_steps(llm)
            assert llm.llm_engine.reset_prefix_cache(reset_connector=True)
        case Corrupt(layers):
            corrupt(llm, layers)
        case Put(content):
            put(llm, content)
        case Adopt(content):
            adopt(llm, content)
        case Abort(prompts, num_steps):
            abort(llm, prompts, num_steps)
        case _ if callable(operation):
            operation(llm)
        case _:
            raise TypeError(f"unknown operation {operation!r}")
    return None


def counts(llm: Any) -> Counter[str]:
    """Return the counts of the live connector's halves and of the dispatcher, since the start."""
    from kvplug import dispatch

    totals = Counter(engine.connector(llm).worker.stats.totals())
    totals.update(engine.scheduler(llm).connector.scheduler.stats.totals())
    if (dispatcher := dispatch.current_dispatcher()) is not None:
        totals.update(dispatcher.stats.totals())
    return totals


def leftovers(llm: Any) -> dict[str, int]:
    """Return what is still held for requests that are gone. One more step lets everyone hear of the last ones."""
    from kvplug import dispatch

    engine.generate(llm, [[1]], 1)
    engine.settle(llm)
    scheduler = engine.scheduler(llm).connector.scheduler
    worker = engine.connector(llm).worker
    left = {
        "requests tracked": scheduler.num_tracked_requests,
        # The last request is reported as finished in the step after it.
        "tables of the scheduler half": max(0, len(scheduler._tables) - 1),
    }
    if hasattr(worker, "tier"):
        dispatcher = dispatch.current_dispatcher()
        assert dispatcher is not None
        return left | {
            "tables of the dispatcher": max(0, len(dispatcher._tables) - 1),
            "pins": sum(worker.tier.allocator._pins),
        }
    return left | {
        "transfers": scheduler.num_transfers + len(worker._loads) + len(worker._saves),
        "parked": scheduler.num_parked,
        "pins": sum(scheduler.store.allocator._pins),
    }


def abort(llm: Any, prompts: Sequence[Sequence[int]], num_steps: int) -> None:
    """Add requests, run some steps, abort all of them."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    ids = [f"abort-{number}" for number in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        llm.llm_engine.add_request(
            request_id, TokensPrompt(prompt_token_ids=list(prompt)), SamplingParams(max_tokens=64, ignore_eos=True)
        )
    for _ in range(num_steps):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(ids)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    engine.settle(llm)


def count_preemptions(llm: Any) -> list[int]:
    """Record each preemption from now on in the list that is returned: the tokens that the scheduler has in flight."""
    scheduler = engine.scheduler(llm)
    synchronous = type(scheduler).__name__ != "AsyncScheduler"
    inner = scheduler._preempt_request
    seen: list[int] = []

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        # Its own bookkeeping reads the scheduler's output after the step: a worker that changed it leaves a rest here.
        assert in_flight == 0 or not synchronous, f"{in_flight} tokens in flight at a preemption"
        seen.append(in_flight)
        return inner(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return seen


def keep_answers(llm: Any) -> list[Any]:
    """Put, from now on, vLLM's `RequestOutput`s into the list that is returned."""
    inner = llm.generate
    seen: list[Any] = []

    def generate(*args: Any, **kwargs: Any) -> Any:
        answers = inner(*args, **kwargs)
        seen.extend(answers)
        return answers

    llm.generate = generate
    return seen


def count_scheduled(llm: Any) -> list[int]:
    """Put, from now on, the tokens in each of vLLM's steps into the list that is returned."""
    scheduler = engine.scheduler(llm)
    inner = scheduler.schedule
    seen: list[int] = []

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        seen.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = schedule
    return seen


def deliver(llm: Any) -> None:
    """Wait until all that pd_reuse was given is in the store that engines share, where others find it."""
    engine.settle(llm)
    for client in engine.connector(llm).worker._executor._clients:
        assert client._calls.drain(time.monotonic() + 60), "calls don't end"


def count_drafts(llm: Any) -> Counter[str]:
    """Count, from now on in what is returned, the tokens that are drafted and those of them that are accepted."""
    scheduler = engine.scheduler(llm)
    inner = scheduler.make_spec_decoding_stats
    seen: Counter[str] = Counter()

    def make_spec_decoding_stats(
        stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        seen.update(drafted=num_draft_tokens, accepted=num_accepted_tokens)
        return inner(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    return seen
