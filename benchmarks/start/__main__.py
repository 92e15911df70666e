"""Measures what kvplug adds to the start of a worker, side by side with starts without it, and prints it.

python -m benchmarks.start [--runs N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from benchmarks.common.figures import Figure, as_json, as_table, spread
from benchmarks.common.processes import ROOT, set_environment

_WALL, _CPU = 0, 1
#: Seconds that a worker may take more than one without kvplug.
LIMIT = 0.3


def figures(found: dict[str, list[list[float]]]) -> list[Figure]:
    """Return the figures of what `benchmarks.start.child` measured."""
    made = []
    for runner in ("v1", "v2"):
        hooked, plain = found[f"{runner} hooked"], found[f"{runner} plain"]
        # CPU seconds of neighbours in time; on the wall, what each takes where nothing else is on the core.
        cpu = [one[_CPU] - other[_CPU] for one, other in zip(hooked, plain, strict=True)]
        best = [min(run[_WALL] for run in runs) for runs in (hooked, plain)]
        made += [
            Figure(f"start_{runner}_cpu_s", median(cpu), "s", at_most=LIMIT, detail=spread(cpu)),
            Figure(
                f"start_{runner}_wall_s",
                best[0] - best[1],
                "s",
                at_most=LIMIT,
                detail=f"best of {len(hooked)}: {best[0]:.3f} over {best[1]:.3f}",
            ),
        ]
    seconds = [run[_CPU] for run in found["replaced"]]
    made.append(Figure("start_replace_cpu_s", median(seconds), "s", at_most=LIMIT, detail=spread(seconds)))
    return made


def measured(runs: int) -> list[Figure]:
    """Measure in a fresh process."""
    command: Sequence[str] = [sys.executable, "-m", "benchmarks.start.child", str(runs)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"The measurement failed:\n{done.stderr}")
    return figures(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Measure. Returns 1 if a figure is beyond its limit."""
    parser = argparse.ArgumentParser(prog="make bench-start", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="starts of each kind (default 15)")
    options = parser.parse_args()
    set_environment()
    made = measured(options.runs)
    print(as_table(made))
    print(as_json(made))
    return 0 if all(figure.met for figure in made) else 1


if __name__ == "__main__":
    sys.exit(main())
