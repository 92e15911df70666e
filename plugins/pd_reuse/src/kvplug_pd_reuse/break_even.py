"""From how many tokens on it is faster to load a prompt's KV than to compute it, measured at start.

Loading costs something that doesn't depend on the length (lookups, and steps until the request may run), and something
per token; computing costs something per token. Computing is measured by a matrix product on the device, in the model's
dtype, and the number of the model's weights that a token meets. It's an estimate: it decides about short prompts only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvplug.log import get_logger

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup
    from kvplug.paged.groups import PagedGroups
    from kvplug.store import Slab
    from kvplug.store.l2.tier import Tier

__all__ = ["MAX_TOKENS", "Line", "break_even", "compute_seconds_per_token", "copy_seconds", "tier_seconds"]

logger = get_logger(__name__)

#: At most this many tokens are computed because loading seems slower: beyond it, a prefill disturbs decodes, which is
#: what a prefill engine is for, and no measurement at start is good enough to say otherwise.
MAX_TOKENS = 512

#: Steps from a lookup to the first step of the request, and seconds that one takes if nothing else runs.
_STEPS, _STEP_SECONDS = 4, 0.001
_REPEATS = 3
_MAX_BLOCKS, _MAX_BYTES = 8, 32 << 20
_TIER_SECONDS = 2.0
_ROWS, _PRODUCTS = 256, 8


class Line(NamedTuple):
    """Seconds that something takes: a fixed part, and a part per block."""

    fixed: float
    each: float


def break_even(load: Line, blocks_per_token: float, compute: float) -> int:
    """Return the number of tokens from which on loading is faster than computing; `MAX_TOKENS` at most.

    Args:
        load: Seconds that loading blocks takes.
        blocks_per_token: Blocks per token, over all KV-cache groups whose blocks are all needed.
        compute: Seconds that computing one token takes, in a long prompt.

    """
    gain = compute - load.each * blocks_per_token
    if gain <= 0:
        return MAX_TOKENS
    return max(1, min(MAX_TOKENS, int(load.fixed / gain) + 1))


def measured(
    vllm_config: Any, paged: PagedGroups, slab: Slab, tiers: Sequence[Tier], groups: Sequence[KVGroup]
) -> int | None:
    """Measure, and return the number of tokens from which on loading is faster; None if it can't be measured.

    To be called before anybody uses the slab. The paged cache keeps its contents.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        paged: The paged caches.
        slab: The memory.
        tiers: The L2 tiers, open. The first one counts.
        groups: The KV-cache groups.

    """
    value_bytes = slab.header_bytes + slab.slot_bytes
    count = max(2, min(_MAX_BLOCKS, _MAX_BYTES // value_bytes))
    store = _in_time(lambda: tier_seconds(tiers[0], value_bytes, count)) if tiers else None
    device = paged.caches[0].device
    compute = compute_seconds_per_token(vllm_config, device)
    if store is None or compute is None:
        return None
    copy = copy_seconds(paged, slab, device, count)
    load = Line(store.fixed + copy.fixed + _STEPS * _STEP_SECONDS, store.each + copy.each)
    needed = [group for group in groups if group.kind == "full"] or list(groups)
    tokens = break_even(load, sum(1 / group.block_size for group in needed), compute)
    logger.info(
        "kvplug: loading takes about %.1f ms and %.3f ms a block, computing %.3f ms a token: prompts of %d tokens and "
        "more are loaded (min_reuse_tokens).",
        load.fixed * 1e3,
        load.each * 1e3,
        compute * 1e3,
        tokens,
    )
    return tokens


def tier_seconds(tier: Tier, value_bytes: int, count: int) -> Line | None:
    """Return what looking up and reading values takes, the fastest of a few tries; None if the tier lost some.

    The values have names of their own, and are removed.

    Args:
        tier: The tier, open.
        value_bytes: Their length.
        count: How many to read at a time; two at least.

    Raises:
        Exception: Whatever the tier raises.

    """
    names = [os.urandom(48) for _ in range(count)]
    buffers = [memoryview(bytearray(value_bytes)) for _ in names]
    try:
        if not all(tier.put(names, buffers, _TIER_SECONDS)):
            return None

        def read(number: int) -> None:
            tier.exists(names[:number], _TIER_SECONDS)
            if None in tier.get(names[:number], buffers[:number], _TIER_SECONDS):
                raise LookupError("a value was lost")

        return _line(read, count)
    finally:
        tier.delete(names, _TIER_SECONDS)


def copy_seconds(paged: PagedGroups, slab: Slab, device: torch.device, count: int) -> Line:
    """Return what copying blocks into the paged cache takes. Its contents stay."""
    cache = paged.caches[0]
    count = min(count, cache.num_blocks - 1, slab.num_slots)
    blocks, slots = list(range(1, count + 1)), list(range(count))
    cache.gather(blocks, slab, slots).wait()

    def copy(number: int) -> None:
        cache.scatter(slab, slots[:number], blocks[:number]).wait()
        _synchronize(device)

    return _line(copy, count)


def _line(run: Callable[[int], None], count: int) -> Line:
    """Time something for one block and for several, and return the line through both."""
    one = min(_seconds(run, 1) for _ in range(_REPEATS))
    if count < 2:  # noqa: PLR2004 - no line through one point
        return Line(0.0, one)
    several = min(_seconds(run, count) for _ in range(_REPEATS))
    each = max(0.0, (several - one) / (count - 1))
    return Line(max(0.0, one - each), each)


def compute_seconds_per_token(vllm_config: Any, device: torch.device) -> float | None:
    """Estimate what computing one token of a long prompt takes on this rank; None if the model doesn't say its size."""
    weights = _weights_per_token(vllm_config.model_config.hf_text_config)
    if weights is None:
        return None
    width = min(4096, max(64, int(vllm_config.model_config.hf_text_config.hidden_size)))
    dtype = vllm_config.model_config.dtype
    rows = torch.ones((_ROWS, width), dtype=dtype, device=device)
    matrix = torch.ones((width, width), dtype=dtype, device=device)

    def multiply(number: int) -> None:
        for _ in range(number):
            torch.mm(rows, matrix)
        _synchronize(device)

    multiply(1)
    several = min(_seconds(multiply, _PRODUCTS) for _ in range(_REPEATS))
    per_weight = several / (_PRODUCTS * _ROWS * width * width)
    return per_weight * weights / int(vllm_config.parallel_config.tensor_parallel_size)


def _weights_per_token(config: Any) -> float | None:
    """Return how many weights of the layers a token is multiplied with, by the model's configuration."""

    def number(*names: str, default: float = 0.0) -> float:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
        return default

    hidden, layers = number("hidden_size"), number("num_hidden_layers")
    if not hidden or not layers:
        return None
    heads = number("num_attention_heads", default=1.0)
    head = number("head_dim", default=hidden / heads)
    attention = hidden * head * (2 * heads + 2 * number("num_key_value_heads", default=heads))
    experts = number("num_experts_per_tok", "num_experts_per_token")
    inner = number("moe_intermediate_size") * experts if experts else 0.0
    inner = inner or number("intermediate_size", default=4 * hidden) * max(1.0, experts)
    return layers * (attention + 3 * hidden * inner)


def _seconds(run: Callable[[int], None], number: int) -> float:
    start = time.perf_counter()
    run(number)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_time(measure: Callable[[], Line | None]) -> Line | None:
    """Measure on a thread that nobody waits for too long: a store may hang, and an engine should start."""
    results: list[Line | None] = []

    def run() -> None:
        try:
            results.append(measure())
        except Exception as error:  # noqa: BLE001 - a store that fails is found out, and told, by whoever uses it
            logger.info("kvplug: the store couldn't be measured: %s", error)

    thread = threading.Thread(target=run, name="kvplug-measure", daemon=True)
    thread.start()
    thread.join(_TIER_SECONDS)
    return results[0] if results else None
