"""Runs the measurements, prints a table, and ends with one line of JSON.

python -m benchmarks.pd [--only NAME ...] [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.common import command
from benchmarks.common.figures import Figure


def _handover(*, quick: bool) -> list[Figure]:
    from benchmarks.pd import handover

    return handover.measure(1, ("4k",)) if quick else handover.measure(5)


def _ttft(*, quick: bool) -> list[Figure]:
    from benchmarks.pd import ttft

    return ttft.measure_handover(1, ("1k",)) if quick else ttft.measure_handover(3)


def _reuse(*, quick: bool) -> list[Figure]:
    from benchmarks.pd import ttft

    return ttft.measure_reuse(1, 1024, (0, 60, 90)) if quick else ttft.measure_reuse(5)


def _itl(*, quick: bool) -> list[Figure]:
    from benchmarks.pd import itl

    return itl.measure(1, 1024) if quick else itl.measure(5)


_MEASUREMENTS: dict[str, Callable[..., list[Figure]]] = {
    "handover": _handover,
    "ttft": _ttft,
    "reuse": _reuse,
    "itl": _itl,
}


def main() -> int:
    """Measure. Returns 1 if a figure is beyond its limit."""
    from benchmarks.pd.servers import running

    with running():
        return command.run("make bench-pd", __doc__.partition("\n")[0], _MEASUREMENTS)


if __name__ == "__main__":
    sys.exit(main())
