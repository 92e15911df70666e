"""Time between the tokens of decodes that run, while a long prompt is prefilled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median

from benchmarks.common.figures import Figure, spread
from benchmarks.common.processes import ROOT
from benchmarks.pd import servers
from benchmarks.pd.servers import tokens

__all__ = ["Watched", "measure"]

#: Requests that decode, and tokens of their prompts.
_DECODES = 4
_PROMPT = 128

#: Seconds for which they decode alone, before and after.
_ALONE = 2.0

_numbers = count()


@dataclass(frozen=True)
class Watched:
    """Decodes beside which a prompt was prefilled.

    Attributes:
        times: When the tokens of each came, from the arrival of the prompt on.
        end: When the first token of the prompt's own answer came.

    """

    times: list[list[float]]
    end: float

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the seconds before each token that came within a time."""
        return [later - earlier for times in self.times for earlier, later in pairwise(times) if begin <= later < end]

    @property
    def before(self) -> list[float]:
        """The seconds between tokens before the prompt came."""
        return self.gaps(-_ALONE, 0)

    @property
    def during(self) -> list[float]:
        """The same while it was prefilled."""
        return self.gaps(0, self.end)


def measure(
    rounds: int, length: int = 4096, plot: Path | None = ROOT / "build" / "bench" / "pd-itl.png"
) -> list[Figure]:
    """Measure the rise with the pair and with one engine, in turns.

    Args:
        rounds: How often.
        length: Tokens of the prompt.
        plot: File for a plot of the round with the median rise; None for none.

    """
    trio = servers.trio()
    # Decodes have the same core in both cases.
    trio.alone.pin(servers.CORES[1])
    watched: dict[str, list[Watched]] = {"split": [], "one": []}
    for _ in range(rounds):
        watched["split"].append(_watch(trio.decode, lambda prompt: trio.handed_over(prompt)[0], length))
        watched["one"].append(_watch(trio.alone, lambda prompt: trio.alone.decode(prompt, 1), length))
        trio.settle()
    rises = {case: [median(one.during) / median(one.before) - 1 for one in found] for case, found in watched.items()}
    if plot is not None:
        from benchmarks.pd.plot import draw

        middle = min(range(rounds), key=lambda number: abs(rises["split"][number] - median(rises["split"])))
        draw(watched["split"][middle], watched["one"][middle], plot, length)
    ratios = [split / one for split, one in zip(rises["split"], rises["one"], strict=True)]
    figures = [
        Figure(
            f"itl_rise_{'split' if case == 'split' else 'one_engine'}",
            median(rises[case]),
            detail=_detail(found, rises[case]),
        )
        for case, found in watched.items()
    ]
    figures.append(Figure("itl_rise_split_vs_one", median(ratios), at_most=0.2, detail=spread(ratios)))
    for case, name in (("split", "split"), ("one", "one_engine")):
        tails = [_p99(one.during) / _p99(one.before) - 1 for one in watched[case]]
        figures.append(Figure(f"itl_rise_{name}_p99", median(tails), detail=spread(tails)))
    return figures


def _watch(engine: servers.Engine, ask: Callable[[list[int]], servers.Answer], length: int) -> Watched:
    """Let requests decode on an engine, send a prompt, and go on for as long again."""
    stop = threading.Event()
    times: list[list[float]] = [[] for _ in range(_DECODES)]

    def decode(number: int) -> None:
        def each(now: float) -> bool:
            times[number].append(now)
            return not stop.is_set()

        engine.decode(tokens(f"decode {next(_numbers)}", _PROMPT), 7000, each=each)

    with ThreadPoolExecutor(_DECODES) as threads:
        running = [threads.submit(decode, number) for number in range(_DECODES)]
        try:
            while not all(times):
                time.sleep(0.02)
            time.sleep(_ALONE + 0.5)
            begin = time.perf_counter()
            answer = ask(tokens(f"prompt {next(_numbers)}", length))
            time.sleep(_ALONE)
        finally:
            stop.set()
        for one in running:
            one.result()
    return Watched([[at - begin for at in each] for each in times], answer.times[0] - begin)


def _detail(watched: list[Watched], rises: list[float]) -> str:
    before, during = (
        median(median(one) for one in side) * 1e3 for side in ([w.before for w in watched], [w.during for w in watched])
    )
    longest = median(max(one.during) for one in watched) * 1e3
    medians = f"medians {before:.1f} ms before, {during:.1f} ms while it is prefilled"
    return f"{spread(rises)}; {medians}; longest {longest:.0f} ms"


def _p99(seconds: list[float]) -> float:
    ordered = sorted(seconds)
    return ordered[int(0.99 * len(ordered))]
