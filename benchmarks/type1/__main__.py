"""Runs the measurements, prints a table, and ends with one line of JSON.

python -m benchmarks.type1 [--only NAME ...] [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.common import command
from benchmarks.common.figures import Figure
from benchmarks.common.processes import in_child


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
    return command.run("make bench-type1", __doc__.partition("\n")[0], _MEASUREMENTS)


if __name__ == "__main__":
    sys.exit(main())
