"""Time to the first token of a prompt that is stored."""

from __future__ import annotations

from statistics import median

from benchmarks.common.figures import Figure, spread
from benchmarks.type1 import engine

__all__ = ["measure"]


def measure(*, runs: int, cold_runs: int) -> list[Figure]:
    """Measure a prompt cold, stored by type1, and in vLLM's own prefix cache on an engine without a connector."""
    blocks = engine.PROMPT_TOKENS // engine.BLOCK_SIZE
    with (
        engine.open_engine("warm-plain", None) as plain,
        engine.open_engine("warm-type1", engine.type1("128MiB")) as ours,
    ):
        cold, first = zip(*(ours.call(engine.ttft, f"warm {number}") for number in range(cold_runs)), strict=True)
        plain.call(engine.ttft, "warm 0")
        used = ours.call(engine.stored_tokens_used)
        num_bytes = blocks * ours.call(engine.block_bytes)
        stored, local, memcpy = [], [], []
        for _ in range(runs):
            seconds, tokens = ours.call(engine.ttft, "warm 0", reset=True)
            stored.append(seconds)
            seconds, others = plain.call(engine.ttft, "warm 0")
            local.append(seconds)
            memcpy.append(ours.call(engine.memcpy_seconds, num_bytes))
            if not tokens == others == first[0]:
                raise AssertionError(f"the first token is {tokens}, {others} and {first[0]}")
        used = ours.call(engine.stored_tokens_used) - used
    if used != runs * blocks * engine.BLOCK_SIZE:
        raise AssertionError(f"{used} tokens in {runs} runs were hits")
    limit = min(local) + min(memcpy)
    by_medians = median(stored) / (median(local) + median(memcpy))
    return [
        Figure(
            "warm_over_limit",
            min(stored) / limit,
            at_most=1.3,
            detail=f"{min(stored) * 1e3:.1f} ms (best of {spread(stored, 1e3)}) over {min(local) * 1e3:.1f} ms in "
            f"vLLM's cache (best of {spread(local, 1e3)}) + {min(memcpy) * 1e3:.1f} ms to copy {num_bytes >> 20} MiB; "
            f"by medians {by_medians:.2f}",
        ),
        Figure(
            "warm_speedup",
            min(cold) / min(stored),
            detail=f"{min(cold):.2f} s cold (best of {spread(cold)}) over the same {min(stored) * 1e3:.1f} ms; "
            f"{engine.PROMPT_TOKENS} tokens",
        ),
    ]
