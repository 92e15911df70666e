"""The command line that all benchmarks have."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

from benchmarks.common.figures import Figure, as_json, as_table
from benchmarks.common.processes import set_environment

__all__ = ["run"]


def run(prog: str, description: str, measurements: Mapping[str, Callable[..., list[Figure]]]) -> int:
    """Measure what the command line says, print a table, and end with one line of JSON.

    Args:
        prog: How the benchmark is called.
        description: What it does.
        measurements: By name, functions that take whether to be `quick`, and return figures.

    Returns:
        1 if a figure is beyond its limit, otherwise 0.

    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--only", nargs="+", choices=list(measurements), help="what to measure; all by default")
    parser.add_argument("--quick", action="store_true", help="few runs: shows that it works, not how fast it is")
    options = parser.parse_args()
    set_environment()
    figures: list[Figure] = []
    for name in options.only or measurements:
        start = time.perf_counter()
        figures += measurements[name](quick=options.quick)
        print(f"measured {name} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(as_table(figures))
    print(as_json(figures))
    return 0 if all(figure.met for figure in figures) else 1
