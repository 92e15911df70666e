"""Runs the measurements, prints a table, and ends with one line of JSON.

python -m benchmarks.store [--only NAME ...] [--quick]
"""

from __future__ import annotations

import importlib
import sys
from functools import partial

from benchmarks.common import command
from benchmarks.common.figures import Figure

#: Modules of this package, each with a function `measure(*, quick)` that returns figures.
MEASUREMENTS = ("l1", "vllm_tiers", "aibrix", "disk", "valkey", "mooncake")


def _measure(name: str, *, quick: bool) -> list[Figure]:
    figures: list[Figure] = importlib.import_module(f"benchmarks.store.{name}").measure(quick=quick)
    return figures


def main() -> int:
    """Measure. Returns 1 if a figure is beyond its limit."""
    measurements = {name: partial(_measure, name) for name in MEASUREMENTS}
    return command.run("make bench-store", __doc__.partition("\n")[0], measurements)


if __name__ == "__main__":
    sys.exit(main())
