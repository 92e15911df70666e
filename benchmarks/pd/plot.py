"""The plot of the time between tokens."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pd.servers import BUDGET

if TYPE_CHECKING:
    from benchmarks.pd.itl import Watched

__all__ = ["draw"]


def draw(split: Watched, one: Watched, file: Path, length: int) -> None:
    """Draw the time between tokens over time, with the pair and with one engine.

    Args:
        split: The decodes of the pair.
        one: Those of one engine.
        file: The PNG to write.
        length: Tokens of the prompt.

    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, rows = plt.subplots(2, 1, figsize=(8, 5.2), sharex=True, sharey=True, layout="constrained")
    for axes, watched, title, colour in (
        (rows[0], one, f"on one engine, in chunks of {BUDGET} tokens", "#e08a3c"),
        (rows[1], split, "prefilled by another engine, and handed over", "#2f6db5"),
    ):
        axes.axvspan(0, watched.end, color="#eceef2", linewidth=0)
        axes.text(
            watched.end / 2,
            0.97,
            "from the prompt's arrival to its first token",
            transform=axes.get_xaxis_transform(),
            horizontalalignment="center",
            verticalalignment="top",
            fontsize=9,
            color="#5a606b",
        )
        for times in watched.times:
            gaps = [(later - earlier) * 1e3 for earlier, later in pairwise(times)]
            axes.plot(times[1:], gaps, ".", color=colour, markersize=3.5, alpha=0.6)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylabel("time between tokens, ms")
        axes.set_title(title, fontsize=11, loc="left")
        axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
    rows[0].set_ylim(top=2 * rows[0].get_ylim()[1])
    rows[0].set_xlim(-2, max(one.end, split.end) + 2)
    rows[1].set_xlabel("seconds from the prompt's arrival")
    figure.suptitle(
        f"Four requests decode while a prompt of {length:,} tokens is prefilled", fontsize=12, x=0.01, ha="left"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)
