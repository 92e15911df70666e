"""The engine of a child process, and what is measured in it.

`open_engine` is for the process that measures; everything else runs in its child.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.processes import Child
from benchmarks.type1.model import MUCH_COMPUTE, VOCABULARY, Shape, model_path

__all__ = [
    "BLOCK_SIZE",
    "PROMPT_TOKENS",
    "REST",
    "block_bytes",
    "blocks_saved",
    "cost",
    "fill",
    "llm",
    "loading",
    "memcpy_seconds",
    "open_engine",
    "stored_tokens_used",
    "ttft",
    "type1",
    "use",
    "watch_connector",
    "watch_loads",
]

BLOCK_SIZE = 32

#: Tokens of a prompt beyond its full blocks, so that every kind of hit leaves the same tokens to compute.
REST = 8

#: Tokens of a long prompt.
PROMPT_TOKENS = 4096 + REST

#: Tokens in a step.
_BUDGET = 8192


def type1(size: str) -> dict[str, Any]:
    """Return type1's configuration with as much host memory. A prompt's blocks take 80 MiB."""
    return {
        "kv_connector": "Type1Connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"l1_size_per_rank": size},
    }


_live: dict[str, Any] = {}


@contextmanager
def open_engine(name: str, connector: dict[str, Any] | None, shape: Shape = MUCH_COMPUTE) -> Iterator[Child]:
    """Start an engine in a process of its own, with a token budget above every prompt."""
    with Child(name) as child:
        child.call(start, connector, shape)
        yield child


def start(connector: dict[str, Any] | None, shape: Shape) -> None:
    """Start the engine of this process, and let it do once what it does later."""
    from support.llm import make_llm

    use(
        make_llm(
            str(model_path(shape)),
            dtype=shape.dtype,
            connector=connector,
            block_size=BLOCK_SIZE,
            num_gpu_blocks=3 * PROMPT_TOKENS // BLOCK_SIZE,
            max_model_len=_BUDGET,
            max_num_batched_tokens=_BUDGET,
            skip_tokenizer_init=True,
        )
    )


def use(llm: Any) -> None:
    """Take an engine as this process's, and let it do once what it does later."""
    _live["llm"] = llm
    _generate(_prompt("warm-up", 64), 2)


def llm() -> Any:
    """Return the engine of this process."""
    return _live["llm"]


def _prompt(seed: str, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    generator = random.Random(seed)  # noqa: S311
    return [generator.randrange(VOCABULARY) for _ in range(num_tokens)]


def _generate(prompt: list[int], max_tokens: int) -> list[int]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    (answer,) = _live["llm"].generate([TokensPrompt(prompt_token_ids=prompt)], parameters, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


# -- Time to first token -----------------------------------------------------------------------------------------------


def ttft(seed: str, *, num_tokens: int = PROMPT_TOKENS, reset: bool = False) -> tuple[float, list[int]]:
    """Return the seconds to the first token of a prompt, and that token.

    Args:
        seed: Says which prompt.
        num_tokens: Its length.
        reset: Whether vLLM's own prefix cache is emptied before.

    """
    if reset:
        from support.llm import reset_local_cache

        reset_local_cache(_live["llm"])
    prompt = _prompt(seed, num_tokens)
    begin = time.perf_counter()
    tokens = _generate(prompt, 1)
    return time.perf_counter() - begin, tokens


# -- Seconds that loads take -------------------------------------------------------------------------------------------


def watch_loads(where: str) -> None:
    """Record from now on how long each load takes.

    Args:
        where: `hook`, the patched line in the model runner, or `start_load_kv`, the connector's method.

    """
    from support import llm as engine

    if where == "hook":
        from vllm.v1.worker import gpu_model_runner

        owner, name = gpu_model_runner, "before_update_states"
    else:
        owner, name = engine.connector(_live["llm"]), where
    inner = getattr(owner, name)
    _live["loads"] = seconds = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin)

    setattr(owner, name, timed)


def loading(seed: str, *, num_tokens: int) -> float:
    """Have vLLM forget a prompt and ask for it again. Returns the seconds of the longest load."""
    _live["loads"].clear()
    ttft(seed, num_tokens=num_tokens, reset=True)
    seconds: list[float] = _live["loads"]
    return max(seconds)


# -- CPU time that the connector takes ---------------------------------------------------------------------------------


@dataclass
class EntryPoints:
    """Adds up the CPU seconds in everything of kvplug that vLLM calls."""

    seconds: float = 0.0
    calls: int = 0
    _inside: bool = field(default=False, repr=False)

    def watch(self, owner: Any, name: str) -> None:
        """Watch an attribute of an object or a module, which vLLM looks up at each call."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # the hook calls the connector
                return inner(*args, **kwargs)
            self._inside = True
            begin = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin
                self.calls += 1
                self._inside = False

        setattr(owner, name, timed)


def watch_connector() -> None:
    """Watch the patched line and every method of both halves of the connector, from now on."""
    from vllm.v1.worker import gpu_model_runner

    from support import llm as engine

    _live["entry points"] = points = EntryPoints()
    points.watch(gpu_model_runner, "before_update_states")
    for half in (engine.connector(_live["llm"]), engine.scheduler(_live["llm"]).connector):
        for name in dir(type(half)):
            if not name.startswith("_") and callable(getattr(type(half), name)):
                points.watch(half, name)


def fill(num_prompts: int) -> None:
    """Fill the connector's host memory."""
    for number in range(num_prompts):
        _generate(_prompt(f"fill {number}"), 1)


def cost(seed: str, num_prompts: int, max_tokens: int) -> dict[str, float]:
    """Serve prompts that nobody has seen, one after the other.

    Returns:
        Seconds on the wall, CPU seconds of the process, and, if they are watched, CPU seconds in the entry points and
        on kvplug's own threads.

    """
    points = _live.get("entry points") or EntryPoints()
    prompts = [_prompt(f"{seed}, {number}") for number in range(num_prompts)]
    inside, beside, cpu, wall = points.seconds, _seconds_beside(), time.process_time(), time.perf_counter()
    for prompt in prompts:
        _generate(prompt, max_tokens)
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "inside": points.seconds - inside + _seconds_beside() - beside,
    }


def _seconds_beside() -> float:
    """Return the CPU seconds of kvplug's threads, all of which live as long as the engine."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith("kvplug") and thread.ident is not None
    )


# -- Counts ------------------------------------------------------------------------------------------------------------


def stored_tokens_used() -> int:
    """Return how many tokens weren't computed because their KV was stored, so far."""
    from kvplug import dispatch
    from support import llm as engine

    connector = getattr(engine.scheduler(_live["llm"]), "connector", None)
    if connector is not None and type(connector).__name__ == "Type2Connector":
        return int(connector.scheduler.stats.get("prefix_cache_hits"))
    dispatcher = dispatch.current_dispatcher()
    return 0 if dispatcher is None else int(dispatcher.stats.get("tokens_skipped"))


def blocks_saved() -> int:
    """Return how many blocks were stored so far."""
    from support import llm as engine

    engine.settle(_live["llm"])  # type2 may still be saving
    return int(engine.connector(_live["llm"]).worker.stats.get("blocks_saved"))


def block_bytes() -> int:
    """Return the bytes of a block over all layers."""
    from support import llm as engine

    return int(engine.connector(_live["llm"]).worker.paged.block_bytes)


def memcpy_seconds(num_bytes: int) -> float:
    """Copy as many bytes between two buffers of this process; the best of several copies."""
    import ctypes

    import torch

    source, target = (torch.ones(num_bytes + 4096, dtype=torch.uint8) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        ctypes.memmove(target.data_ptr() + 2048, source.data_ptr(), num_bytes)
        best = min(best, time.perf_counter() - begin)
    return best
