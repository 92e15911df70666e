"""What the connector costs where it never helps."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.common.figures import Figure, spread
from benchmarks.type1 import engine

__all__ = ["measure"]

_MAX_TOKENS = 16


def measure(runs: int, connector: dict[str, Any] | None = None) -> list[Figure]:
    """Measure prompts that nobody has seen before, on an engine with a connector and on one without, in turns.

    The host memory is full by then, so each block that is saved evicts another.

    Args:
        runs: Prompts of each engine.
        connector: The connector's configuration, with host memory for less than three prompts; type1's by default.

    """
    connector = engine.type1("160MiB") if connector is None else connector
    name = connector["kv_connector"].removesuffix("Connector").lower()
    with (
        engine.open_engine("overhead-plain", None) as plain,
        engine.open_engine(f"overhead-{name}", connector) as ours,
    ):
        ours.call(engine.fill, 2)
        ours.call(engine.watch_connector)
        saved = ours.call(engine.blocks_saved)
        costs: list[dict[str, float]] = []
        without: list[dict[str, float]] = []
        for run in range(runs):
            pair = [(without, plain), (costs, ours)]
            for results, child in pair if run % 2 else reversed(pair):
                results.append(child.call(engine.cost, f"miss {run}", 1, _MAX_TOKENS))
        saved = ours.call(engine.blocks_saved) - saved
        used = ours.call(engine.stored_tokens_used)
    if used or saved != runs * (engine.PROMPT_TOKENS // engine.BLOCK_SIZE):
        raise AssertionError(f"{used} tokens were hits, and {saved} blocks were saved")
    shares = [one["inside"] / one["cpu"] for one in costs]
    walls = [one["wall"] / other["wall"] - 1 for one, other in zip(costs, without, strict=True)]
    cpus = [one["cpu"] / other["cpu"] - 1 for one, other in zip(costs, without, strict=True)]
    seconds = median(one["wall"] for one in without)
    return [
        Figure(
            "all_miss_cpu_overhead",
            median(shares),
            at_most=0.01,
            detail=f"{spread(shares)}; CPU time in kvplug over the process's; {engine.PROMPT_TOKENS} tokens of prompt, "
            f"{seconds:.1f} s without a connector, {_MAX_TOKENS} tokens of output",
        ),
        Figure(
            "all_miss_wall_ab",
            median(walls),
            detail=f"{spread(walls)}; seconds with {name} over seconds without, minus 1, run by run",
        ),
        Figure(
            "all_miss_cpu_ab",
            median(cpus),
            detail=f"{spread(cpus)}; the same for CPU seconds",
        ),
    ]
