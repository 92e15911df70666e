"""Runs the measurements, prints a table, and ends with one line of JSON.

python -m benchmarks.type1 [--only NAME ...] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from benchmarks.common.figures import Figure, as_json, as_table
from benchmarks.common.processes import in_child, set_environment


def _overhead(*, quick: bool) -> list[Figure]:
    from benchmarks.type1 import overhead

    return overhead.measure(2 if quick else 7)


def _warm(*, quick: bool) -> list[Figure]:
    from benchmarks.type1 import warm

    return warm.measure(runs=2 if quick else 15, cold_runs=1 if quick else 3)


def _example(*, quick: bool) -> list[Figure]:
    from benchmarks.type1 import example

    return example.measure(1 if quick else 5)


def _copies(*, quick: bool) -> list[Figure]:
    from benchmarks.type1 import copies

    return in_child(copies.measure, 2 if quick else 31)


def _dispatching(*, quick: bool) -> list[Figure]:
    from benchmarks.type1 import dispatching

    return in_child(dispatching.measure, 2 if quick else 1000)


def _keys(*, quick: bool) -> list[Figure]:
    from benchmarks.type1 import keys

    return in_child(keys.measure, 1 if quick else 9)


def _slab(*, quick: bool) -> list[Figure]:  # noqa: ARG001 - it has no runs to leave out
    from benchmarks.type1 import slab

    return slab.measure()


_MEASUREMENTS: dict[str, Callable[..., list[Figure]]] = {
    "overhead": _overhead,
    "warm": _warm,
    "example": _example,
    "copies": _copies,
    "dispatch": _dispatching,
    "keys": _keys,
    "slab": _slab,
}


def main() -> int:
    """Measure. Returns 1 if a figure is beyond its limit."""
    parser = argparse.ArgumentParser(prog="make bench-type1", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(_MEASUREMENTS), help="what to measure; all by default")
    parser.add_argument("--quick", action="store_true", help="few runs: shows that it works, not how fast it is")
    options = parser.parse_args()
    set_environment()
    figures: list[Figure] = []
    for name in options.only or _MEASUREMENTS:
        start = time.perf_counter()
        figures += _MEASUREMENTS[name](quick=options.quick)
        print(f"measured {name} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(as_table(figures))
    print(as_json(figures))
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
