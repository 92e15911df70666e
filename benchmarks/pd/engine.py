"""What is measured inside the two engines of child processes between which prompts are handed over.

The clock is `time.perf_counter`, which on Linux is the same in all processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pd.servers import BLOCK_SIZE, pin, tokens
from benchmarks.type1.model import Shape, model_path

__all__ = ["Span", "decode", "prefill", "settle", "start", "store_get", "store_put", "use_store", "value_bytes"]

#: Something that a connector did: what, when it began and when it ended.
Span = tuple[str, float, float]

_live: dict[str, Any] = {}
_spans: list[Span] = []


def start(
    shape: Shape, connector: Mapping[str, Any], core: int, *, num_blocks: int, max_tokens: int, budget: int
) -> None:
    """Start the engine of this process on a core of its own, and note what its connector does from now on.

    Args:
        shape: Of the model.
        connector: Its configuration.
        core: The core.
        num_blocks: Blocks of its own cache.
        max_tokens: Tokens of the longest request.
        budget: Tokens in a step.

    """
    from kvplug.paged.cache import PagedCache
    from kvplug.scheduled.worker import WorkerHalf
    from kvplug.store.l2.exchange import Exchange
    from support.llm import make_llm

    use_store(connector, core, shape)
    _live["llm"] = make_llm(
        str(model_path(shape)),
        dtype=shape.dtype,
        connector=connector,
        block_size=BLOCK_SIZE,
        num_gpu_blocks=num_blocks,
        max_model_len=max_tokens,
        max_num_batched_tokens=budget,
        skip_tokenizer_init=True,
    )
    for owner, names in (
        (PagedCache, ("gather", "scatter")),
        (Exchange, ("exists", "put", "get")),
        (WorkerHalf, ("end",)),
    ):
        for name in names:
            _watch(owner, name)


def _watch(owner: type, name: str) -> None:
    inner = getattr(owner, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return inner(*arguments, **options)
        finally:
            # A step that saves nothing is of no interest.
            if name != "end" or arguments[1].saves:
                _spans.append((name, begin, time.perf_counter()))

    setattr(owner, name, watched)


def _serve(prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any]) -> tuple[Any, list[Span]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine = _live["llm"].llm_engine
    _spans.clear()
    begin = time.perf_counter()
    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=max_tokens, extra_args={"kv_transfer_params": dict(params)}
    )
    engine.add_request(f"request {begin}", TokensPrompt(prompt_token_ids=list(prompt)), sampling)
    added = time.perf_counter()
    answer = None
    while answer is None or not answer.finished:
        for output in engine.step():
            answer = output
    return answer, [("request", begin, added), *_spans, ("answer", added, time.perf_counter())]


def prefill(seed: str, count: int) -> tuple[dict[str, Any], list[Span]]:
    """Prefill a prompt for another engine. Returns what that is to be told, and what was done so far.

    What is left to do is done on the connector's own threads: see `settle`.
    """
    answer, spans = _serve(tokens(seed, count), 1, {"do_remote_decode": True, "do_remote_prefill": False})
    return answer.kv_transfer_params, spans


def decode(seed: str, count: int, params: Mapping[str, Any]) -> tuple[int, list[Span]]:
    """Let the prompt be decoded. Returns how many of its tokens were computed here, and what was done."""
    stats = _stats()
    before = stats.totals().get("handover_tokens_computed", 0)
    _, spans = _serve(tokens(seed, count), 1, params)
    return int(stats.totals()["handover_tokens_computed"] - before), spans


def _stats() -> Any:
    from support import llm

    return llm.scheduler(_live["llm"]).connector.scheduler.stats


def settle() -> list[Span]:
    """Take steps until nothing is under way, and have vLLM's own cache forget. Returns all that was done."""
    from support import llm

    llm.settle(_live["llm"])
    llm.reset_local_cache(_live["llm"])
    return list(_spans)


# -- The store alone ---------------------------------------------------------------------------------------------------


def value_bytes(shape: Shape) -> int:
    """Return the bytes of one value in the store: a block with its header."""
    from kvplug.store.l2.value import HEADER_BYTES

    item = {"float32": 4, "bfloat16": 2}[shape.dtype]
    return HEADER_BYTES + BLOCK_SIZE * shape.layers * 2 * shape.kv_heads * shape.head * item


def use_store(connector: Mapping[str, Any], core: int, shape: Shape) -> None:
    """Say which store `store_put` and `store_get` are about, and which core they are to run on."""
    pin([os.getpid()], core)
    _live["connector"], _live["value bytes"] = connector, value_bytes(shape)


def _store(slots: int) -> Any:
    """Return a client of the same store, with memory of its own that has been written to."""
    if "client" not in _live:
        import numpy as np

        from kvplug.stats import Stats
        from kvplug.store import Slab
        from kvplug.store.l2.value import HEADER_BYTES
        from kvplug.store.tiered.make import make_clients, start_clients
        from kvplug_pd_reuse.settings import PDReuseSettings

        settings = PDReuseSettings.load(_live["connector"]["kv_connector_extra_config"])
        slab = Slab(slots, _live["value bytes"] - HEADER_BYTES, header_bytes=HEADER_BYTES)
        slab.rows[:] = np.random.default_rng(0).integers(0, 256, slab.rows.shape, dtype=np.uint8)
        (client,), _ = make_clients(settings, Stats(), slab, item_bytes=4, shard="alone", layout="benchmark")
        start_clients([client], required=True)
        _live["client"] = client
    return _live["client"]


def _keys(seed: str, blocks: int) -> list[bytes]:
    import hashlib

    return [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(blocks)]


def _calls(seed: str, blocks: int, slots: int, call: Callable[..., Any]) -> float:
    """Make calls in batches as the connector does, and return the seconds until the last of them has ended."""
    from kvplug.store.tiered.writer import batches

    client = _store(slots)
    pairs = list(zip(_keys(seed, blocks), range(blocks), strict=True))
    begin = time.perf_counter()
    operations = []
    for batch in batches(pairs, _live["value bytes"], client.tier.max_calls):
        keys, numbers = zip(*batch, strict=True)
        operations.append(call(client, keys, numbers))
    for operation in operations:
        operation.wait(time.monotonic() + 60)
        if not all(operation.result):
            raise AssertionError("the store kept less than it was given")
    return time.perf_counter() - begin


def store_put(seed: str, blocks: int, slots: int) -> float:
    """Write as many values as a prompt has blocks, with the client that the connector has."""
    return _calls(seed, blocks, slots, lambda client, keys, numbers: client.put(keys, numbers))


def store_get(seed: str, blocks: int, slots: int) -> float:
    """Look them up, and read them."""
    client = _store(slots)
    begin = time.perf_counter()
    found = client.exists(_keys(seed, blocks))
    found.wait(time.monotonic() + 60)
    if not all(found.result):
        raise AssertionError("the store doesn't find what it was given")
    return time.perf_counter() - begin + _calls(seed, blocks, slots, lambda one, keys, numbers: one.get(keys, numbers))
