"""Runs a soak for as long as one likes: ``make soak ARGS="--minutes 30"``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path

from support import engines
from support.llm import compare
from support.models import model_path
from support.soak import RUNNER_SETTINGS, replay, soak

#: Most that log-probabilities may differ from a plain engine's: hits change the order of sums.
CLOSE = 1e-5


def main() -> int:
    """Serve requests, then compare samples of the answers to a plain engine's. Returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        prog="make soak", description="Serves short requests with type1 and checks that what it holds stays flat."
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to serve (default: 10)")
    parser.add_argument("--requests", type=int, help="serve so many requests instead: repeats a run exactly")
    parser.add_argument("--seed", type=int, default=0, help="decides all that happens (default: 0)")
    parser.add_argument("--runner", choices=engines.RUNNERS, default="v1", help="vLLM's model runner (default: v1)")
    parser.add_argument("--asynchronous", action="store_true", help="with asynchronous scheduling")
    parser.add_argument("--l2", choices=["disk"], help="with an L2 tier behind L1 (default: none)")
    options = parser.parse_args()
    minutes = options.minutes if options.requests is None else None
    print(
        f"seed {options.seed}, runner {options.runner}, {'' if options.asynchronous else 'no '}asynchronous scheduling"
    )
    timeout = 86_400.0 if minutes is None else 120 * minutes + 600
    with tempfile.TemporaryDirectory() as folder:
        samples = str(Path(folder) / "samples")
        report = engines.run(
            soak,
            runner=options.runner,
            timeout=timeout,
            model=model_path("llama"),
            samples=samples,
            requests=options.requests or sys.maxsize,
            seed=options.seed,
            asynchronous=options.asynchronous,
            minutes=minutes,
            progress=_printed(Path(folder) / "progress"),
            disk=str(Path(folder) / "l2") if options.l2 else None,
            **RUNNER_SETTINGS[options.runner],
        )
        print(f"{report.line()}; comparing {report.samples} samples to a plain engine's", flush=True)
        ours, plain = engines.run(replay, timeout=timeout, model=model_path("llama"), samples=[samples])
    problems = list(report.problems)
    try:
        compare(ours, plain, atol=CLOSE)
    except AssertionError as error:
        problems.append(f"sample {error}")
    print(*problems, sep="\n", end="\n" if problems else "")
    print("not everything is well" if problems else "all is well")
    return 1 if problems else 0


def _printed(pipe: Path) -> str:
    """Make a named pipe of which each line is printed as it comes."""
    os.mkfifo(pipe)

    def copy() -> None:
        with pipe.open() as lines:
            for line in lines:
                print(line, end="", flush=True)

    threading.Thread(target=copy, daemon=True).start()
    return str(pipe)


if __name__ == "__main__":
    sys.exit(main())
