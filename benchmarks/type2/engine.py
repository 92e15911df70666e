"""What is measured inside the engines of child processes.

Engines are started as for type1's measurements (`benchmarks.type1.engine`).
"""

from __future__ import annotations

import random
import time
from itertools import count
from typing import Any

from benchmarks.type1 import engine
from benchmarks.type1.model import MUCH_COMPUTE, VOCABULARY, model_path

__all__ = ["Prompts", "example", "fill", "latencies", "serve", "start", "stored", "type2"]


def type2(size: str, **settings: Any) -> dict[str, Any]:
    """Return type2's configuration with as much host memory."""
    return {
        "kv_connector": "Type2Connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"l1_size_per_rank": size, **settings},
    }


def example(folder: str) -> dict[str, Any]:
    """Return the configuration of vLLM's ExampleConnector, with its files in a folder."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }


_numbers = count()


def start(connector: dict[str, Any] | None, num_blocks: int, *, slow_tier: bool = False) -> None:
    """Start the engine of this process.

    Args:
        connector: Its configuration.
        num_blocks: Blocks of its own cache.
        slow_tier: Whether `slow` is an L2 tier.

    """
    from support.llm import make_llm

    if slow_tier:
        from benchmarks.type2 import slow_tier as tier

        tier.use()
    engine.use(
        make_llm(
            str(model_path(MUCH_COMPUTE)),
            dtype=MUCH_COMPUTE.dtype,
            connector=connector,
            block_size=engine.BLOCK_SIZE,
            num_gpu_blocks=num_blocks,
            max_model_len=min(2048, (num_blocks - 1) * engine.BLOCK_SIZE),
            max_num_batched_tokens=2048,
            skip_tokenizer_init=True,
        )
    )


class Prompts:
    """Prompts with some prefixes in turns, and ends of their own.

    Args:
        name: Makes them differ from all others.
        num_prefixes: How many prefixes there are.
        shared: Tokens of a prefix.
        own: Tokens of an end.

    """

    def __init__(self, name: str, num_prefixes: int, shared: int, own: int) -> None:
        self._prefixes = [_tokens(f"{name} {number}", shared) for number in range(num_prefixes)]
        self._own = own
        self._next = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def next(self) -> list[int]:
        """Return one more prompt."""
        prefix = self._prefixes[self._next % len(self._prefixes)]
        self._next += 1
        return prefix + _tokens(f"end {next(_numbers)}", self._own)


def _tokens(seed: str, count: int) -> list[int]:
    generator = random.Random(seed)  # noqa: S311
    return [generator.randrange(VOCABULARY) for _ in range(count)]


_prompts: dict[tuple[Any, ...], Prompts] = {}


def _of(description: tuple[str, int, int, int]) -> Prompts:
    return _prompts.setdefault(description, Prompts(*description))


def _add(prompt: list[int], max_tokens: int) -> str:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    name = f"request {next(_numbers)}"
    parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    engine.llm().llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)
    return name


# -- Throughput --------------------------------------------------------------------------------------------------------


def serve(description: tuple[str, int, int, int], max_tokens: int) -> tuple[float, int]:
    """Serve a prompt for each prefix, all of which arrive at once.

    Args:
        description: The arguments of `Prompts`.
        max_tokens: Tokens of each answer.

    Returns:
        Seconds, and tokens of the prompts that weren't computed.

    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = _of(description)
    inputs = [TokensPrompt(prompt_token_ids=prompts.next()) for _ in range(len(prompts))]
    parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    begin = time.perf_counter()
    answers = engine.llm().generate(inputs, parameters, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return seconds, sum(answer.num_cached_tokens or 0 for answer in answers)


def fill(description: tuple[str, int, int, int]) -> None:
    """Serve a prompt for each prefix, one after the other, so that no write to L2 is dropped for lack of room."""
    from support.llm import settle

    prompts = _of(description)
    for _ in range(len(prompts)):
        _add(prompts.next(), 1)
        while engine.llm().llm_engine.has_unfinished_requests():
            engine.llm().llm_engine.step()
        settle(engine.llm())


# -- Latency -----------------------------------------------------------------------------------------------------------


def stored() -> int:
    """Return the tokens that were loaded instead of computed, so far."""
    from support import llm

    return int(llm.scheduler(engine.llm()).connector.scheduler.stats.get("prefix_cache_hits"))


def latencies(
    description: tuple[str, int, int, int] | None, steps: int, every: int, first_steps: int
) -> dict[str, Any]:
    """Let one request decode, and measure the time between its tokens, while others arrive.

    Args:
        description: The arguments of `Prompts`, of the others; None for none. Each has one token of output.
        steps: Tokens to measure.
        every: Tokens from one arrival to the next.
        first_steps: Tokens before that.

    Returns:
        `seconds` between tokens; how many others `finished` meanwhile; how many `others` there were in all, and how
        many tokens of their prompts were `loaded`.

    """
    core = engine.llm().llm_engine
    victim = _add(_tokens("victim", 64), first_steps + steps + 8)
    seconds: list[float] = []
    others = finished = taken = 0
    loaded = stored()
    ended = False
    while not ended:
        measured = first_steps <= taken < first_steps + steps
        if description is not None and taken < first_steps + steps and taken % every == 0:
            _add(_of(description).next(), 1)
            others += 1
        before = time.perf_counter()
        outputs = core.step()
        passed = time.perf_counter() - before
        for output in outputs:
            if output.request_id == victim:
                taken += 1
                ended = output.finished
            elif measured:
                finished += output.finished
        if measured:
            seconds.append(passed)
    while core.has_unfinished_requests():
        core.step()
    return {"seconds": seconds, "finished": finished, "others": others, "loaded": stored() - loaded}
