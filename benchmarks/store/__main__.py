"""Runs the measurements, prints a table, and ends with one line of JSON.

python -m benchmarks.store [--only NAME ...] [--quick]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time

from benchmarks.common.figures import Figure, as_json, as_table
from benchmarks.common.processes import set_environment

#: Modules of this package, each with a function `measure(*, quick)` that returns figures.
MEASUREMENTS = ("l1", "vllm_tiers", "aibrix", "disk", "valkey", "mooncake")


def main() -> int:
    """Measure. Returns 1 if a figure is beyond its limit."""
    parser = argparse.ArgumentParser(prog="make bench-store", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, help="what to measure; all by default")
    parser.add_argument("--quick", action="store_true", help="few runs: shows that it works, not how fast it is")
    options = parser.parse_args()
    set_environment()
    figures: list[Figure] = []
    for name in options.only or MEASUREMENTS:
        start = time.perf_counter()
        figures += importlib.import_module(f"benchmarks.store.{name}").measure(quick=options.quick)
        print(f"measured {name} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(as_table(figures))
    print(as_json(figures))
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
