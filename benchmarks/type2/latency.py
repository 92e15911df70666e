"""How much the tokens of a request that runs come later while others load."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common.figures import Figure, spread
from benchmarks.common.processes import Child
from benchmarks.type2 import engine

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["measure", "measure_slow_store"]

#: Tokens of a shared prefix; each prompt has one more of its own, which is all that is left to compute.
_SHARED = 1024
_SHARED_IN_L2 = 512

#: Tokens from one arrival to the next where L2 is slow, so that fewer requests wait for it than may be held back.
_EVERY = 6

_FIRST_STEPS = 24

#: Blocks of the engine's own cache: the request that is measured, two prefixes and some that are loading, not all.
_NUM_BLOCKS = 200
_NUM_PREFIXES = 12


def measure(rounds: int, steps: int) -> list[Figure]:
    """Measure the time between tokens while another request arrives at each of them.

    Args:
        rounds: How often each case is measured, in turns.
        steps: Tokens per round.

    """
    cases = {"local": ("local", 2, _SHARED, 1), "loading": ("stored", _NUM_PREFIXES, _SHARED, 1)}
    figures = []
    for transfer, name in (("between_steps", "itl_rise_while_loading"), ("layerwise", "itl_rise_layerwise")):
        connector = engine.type2("400MiB", transfer=transfer)
        with Child(f"latency-{transfer}") as child:
            child.call(engine.start, connector, _NUM_BLOCKS)
            child.call(engine.serve, cases["local"], 1)
            child.call(engine.serve, cases["loading"], 1)
            results = _measure(child, cases, rounds, steps, every=1)
        for result in results["loading"]:
            if result["loaded"] < 0.95 * _SHARED * result["others"] or result["finished"] < 0.8 * steps:
                finished = f"{result['finished']} others finished in {steps} steps"
                raise AssertionError(f"{finished}; {result['others']} loaded {result['loaded']} tokens")
        # Without a limit where type2 doesn't work like this by default.
        at_most = 0.1 if transfer == "between_steps" else None
        figures += _figures(name, results, at_most, f"a request with {_SHARED} stored tokens arrives at each token")
    return figures


def measure_slow_store(rounds: int, steps: int) -> list[Figure]:
    """Measure the same with an L2 tier that takes long to say what it has."""
    from benchmarks.type2.slow_tier import LOOKUP_SECONDS

    cases = {"local": ("local", 2, _SHARED_IN_L2, 1), "loading": ("stored", 24, _SHARED_IN_L2, 1)}
    # L1 has room for what is on its way, which may take a quarter of it, and not for all prefixes.
    connector = engine.type2("200MiB", l2="slow", l1_eviction_policy="LRU", l2_load_timeout=2.0)
    with Child("latency-slow-store") as child:
        child.call(engine.start, connector, _NUM_BLOCKS, slow_tier=True)
        child.call(engine.serve, cases["local"], 1)
        child.call(engine.fill, cases["loading"])
        results = _measure(child, cases, rounds, steps, every=_EVERY)
    shares = [result["loaded"] / (result["others"] * _SHARED_IN_L2) for result in results["loading"]]
    detail = (
        f"a request with {_SHARED_IN_L2} tokens that only L2 has arrives at every {_EVERY}th token; L2 takes "
        f"{LOOKUP_SECONDS * 1e3:.0f} ms per lookup; {median(shares):.0%} of them loaded"
    )
    if median(shares) < 0.9:
        raise AssertionError(detail)
    return _figures("itl_rise_slow_store", results, 0.1, detail)


def _measure(
    child: Child, cases: dict[str, tuple[str, int, int, int]], rounds: int, steps: int, *, every: int
) -> dict[str, list[dict[str, Any]]]:
    """Measure a request alone, and in all cases, in turns."""
    results: dict[str, list[dict[str, Any]]] = {"alone": [], **{name: [] for name in cases}}
    for _ in range(rounds):
        for name, found in results.items():
            found.append(child.call(engine.latencies, cases.get(name), steps, every, _FIRST_STEPS))
    return results


def _figures(name: str, results: dict[str, list[dict[str, Any]]], at_most: float | None, what: str) -> list[Figure]:
    """Return rises over the same requests whose prefixes vLLM's own cache has, and over no other requests."""
    medians = {case: [median(result["seconds"]) for result in found] for case, found in results.items()}
    tails = {case: [_p99(result["seconds"]) for result in found] for case, found in results.items()}
    rises = [one / other - 1 for one, other in zip(medians["loading"], medians["local"], strict=True)]
    alone = [one / other - 1 for one, other in zip(medians["loading"], medians["alone"], strict=True)]
    tail = [one / other - 1 for one, other in zip(tails["loading"], tails["local"], strict=True)]
    times = ", ".join(f"{median(values) * 1e3:.1f} ms {case}" for case, values in medians.items())
    late = ", ".join(f"{median(values) * 1e3:.1f} ms {case}" for case, values in tails.items())
    return [
        Figure(name, median(rises), at_most=at_most, detail=f"{spread(rises)}; medians: {times}; {what}"),
        Figure(f"{name}_p99", median(tail), detail=f"{spread(tail)}; p99: {late}"),
        Figure(f"{name}_vs_alone", median(alone), detail=f"{spread(alone)}; with what the others compute"),
    ]


def _p99(seconds: Sequence[float]) -> float:
    ordered = sorted(seconds)
    return ordered[int(0.99 * len(ordered))]
