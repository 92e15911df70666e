"""Requests per second where the prompts' prefixes are more than the engine's own cache holds."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median

from benchmarks.common.figures import Figure, spread
from benchmarks.common.processes import ROOT, Child
from benchmarks.type1 import engine as type1
from benchmarks.type2 import engine

__all__ = ["measure"]

_MAX_TOKENS = 16


def measure(rounds: int, num_prefixes: int, shared: int) -> list[Figure]:
    """Measure four engines on the same prompts, in turns.

    Args:
        rounds: How often.
        num_prefixes: Prefixes that prompts have in turns: four times as many as the engine's own cache holds.
        shared: Tokens of each.

    """
    # A quarter of the prefixes', and the null block.
    num_blocks = num_prefixes * shared // type1.BLOCK_SIZE // 4 + 1
    # By tokens that a prompt has of its own. ExampleConnector finds whole prompts only, but for their last block.
    cases = {
        "short ends": ("shared", num_prefixes, shared, 8),
        "80 % shared": ("shared", num_prefixes, shared, shared // 4),
        "90 % shared": ("shared", num_prefixes, shared, shared // 9),
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "build"))
        connectors = {
            "type2": engine.type2("512MiB"),
            "none": None,
            "type1": type1.type1("512MiB"),
            "example": engine.example(folder),
        }
        children = {name: stack.enter_context(Child(f"throughput-{name}")) for name in connectors}

        def start(name: str) -> None:
            children[name].call(engine.start, connectors[name], num_blocks)
            if name != "none":
                children[name].call(engine.serve, cases["short ends"], 1)

        # Nothing is measured yet, so they may start together.
        with ThreadPoolExecutor() as threads:
            list(threads.map(start, children))
        seconds: dict[str, dict[str, list[float]]] = {case: {name: [] for name in children} for case in cases}
        used = {case: dict.fromkeys(children, 0) for case in cases}
        for _ in range(rounds):
            for case, prompts in cases.items():
                for name, child in children.items():
                    passed, skipped = child.call(engine.serve, prompts, _MAX_TOKENS)
                    seconds[case][name].append(passed)
                    used[case][name] += skipped
    total = rounds * num_prefixes * shared
    for case, of_engine in used.items():
        if of_engine["type2"] < 0.9 * total or of_engine["none"] > 0.1 * total:
            raise AssertionError(f"{case}: of {total} shared tokens, {of_engine} weren't computed")
    figures = []
    # The limits are for prompts as chats with a long system prompt have them. The others show how it depends on that.
    for case, suffix, limited in (
        ("90 % shared", "", True),
        ("80 % shared", "_80pct", False),
        ("short ends", "_short_ends", False),
    ):
        for figure, other, limit in (
            ("throughput_vs_none", "none", 3.0),
            ("throughput_vs_type1", "type1", None),
            ("throughput_vs_example", "example", 1.5),
        ):
            theirs, ours = seconds[case][other], seconds[case]["type2"]
            figures.append(_figure(figure + suffix, theirs, ours, limit if limited else None, case))
    return figures


def _figure(name: str, theirs: list[float], ours: list[float], at_least: float | None, case: str) -> Figure:
    """Return how many times as many requests per second there are with type2, by the seconds of each round."""
    ratios = [other / one for other, one in zip(theirs, ours, strict=True)]
    detail = f"{case}: {spread(ratios)}; {median(theirs):.2f} s over {median(ours):.2f} s with type2"
    return Figure(name, median(ratios), at_least=at_least, detail=detail)
