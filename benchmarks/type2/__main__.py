"""Runs the measurements, prints a table, and ends with one line of JSON.

python -m benchmarks.type2 [--only NAME ...] [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.common import command
from benchmarks.common.figures import Figure
from benchmarks.common.processes import in_child


def _overhead(*, quick: bool) -> list[Figure]:
    from benchmarks.type1 import overhead
    from benchmarks.type2 import engine

    return overhead.measure(2 if quick else 7, engine.type2("160MiB"))


def _scheduling(*, quick: bool) -> list[Figure]:
    from benchmarks.type2 import scheduling

    return in_child(scheduling.measure, *((8, 8, 4096) if quick else (96, 256, 32768)))


def _latency(*, quick: bool) -> list[Figure]:
    from benchmarks.type2 import latency

    return latency.measure(*((1, 32) if quick else (7, 128)))


def _slow_store(*, quick: bool) -> list[Figure]:
    from benchmarks.type2 import latency

    return latency.measure_slow_store(*((1, 48) if quick else (5, 160)))


def _transfer(*, quick: bool) -> list[Figure]:
    from benchmarks.type2 import transfer

    return transfer.measure(2 if quick else 15)


def _throughput(*, quick: bool) -> list[Figure]:
    from benchmarks.type2 import throughput

    return throughput.measure(*((1, 8, 256) if quick else (3, 12, 1024)))


_MEASUREMENTS: dict[str, Callable[..., list[Figure]]] = {
    "overhead": _overhead,
    "scheduling": _scheduling,
    "latency": _latency,
    "slow_store": _slow_store,
    "transfer": _transfer,
    "throughput": _throughput,
}


def main() -> int:
    """Measure. Returns 1 if a figure is beyond its limit."""
    return command.run("make bench-type2", __doc__.partition("\n")[0], _MEASUREMENTS)


if __name__ == "__main__":
    sys.exit(main())
