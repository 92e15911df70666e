"""The two ways to transfer, for one request on an idle engine."""

from __future__ import annotations

from statistics import median

from benchmarks.common.figures import Figure, spread
from benchmarks.type1 import engine
from benchmarks.type2.engine import type2

__all__ = ["measure"]


def measure(runs: int) -> list[Figure]:
    """Measure the time to the first token of a stored prompt with either setting, and in vLLM's own cache.

    Args:
        runs: How often each is measured, in turns.

    """
    with (
        engine.open_engine("transfer-plain", None) as plain,
        engine.open_engine("transfer-between", type2("128MiB", transfer="between_steps")) as between,
        engine.open_engine("transfer-layerwise", type2("128MiB", transfer="layerwise")) as layerwise,
    ):
        children = {"local": plain, "between": between, "layerwise": layerwise}
        cold, first = {}, {}
        for name, child in children.items():
            cold[name], first[name] = child.call(engine.ttft, "warm")
            child.call(engine.ttft, "warm", reset=name != "local")
        before = {name: child.call(engine.stored_tokens_used) for name, child in children.items()}
        seconds: dict[str, list[float]] = {name: [] for name in children}
        for _ in range(runs):
            for name, child in children.items():
                passed, tokens = child.call(engine.ttft, "warm", reset=name != "local")
                seconds[name].append(passed)
                if tokens != first["local"]:
                    raise AssertionError(f"{name}: the first token is {tokens}, not {first['local']}")
        blocks = engine.PROMPT_TOKENS // engine.BLOCK_SIZE
        for name in ("between", "layerwise"):
            used = children[name].call(engine.stored_tokens_used) - before[name]
            if used != runs * blocks * engine.BLOCK_SIZE:
                raise AssertionError(f"{name}: {used} tokens in {runs} runs were hits")
    spreads = {name: f"{spread(values, 1e3)} ms" for name, values in seconds.items()}
    middle = {name: median(values) for name, values in seconds.items()}
    return [
        Figure(
            "ttft_layerwise_vs_between_steps",
            middle["layerwise"] / middle["between"],
            detail=f"{spreads['layerwise']} layer-wise, {spreads['between']} between steps; {engine.PROMPT_TOKENS} "
            "tokens that L1 has, an idle engine",
        ),
        Figure(
            "ttft_between_steps_vs_local",
            middle["between"] / middle["local"],
            detail=f"over {spreads['local']} in vLLM's own cache",
        ),
        Figure("ttft_layerwise_vs_local", middle["layerwise"] / middle["local"], detail="the same, layer-wise"),
        Figure(
            "ttft_speedup", cold["between"] / middle["between"], detail=f"{cold['between']:.2f} s cold, between steps"
        ),
    ]
