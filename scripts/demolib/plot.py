"""The demo's figure."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["plot"]

_SERIES = {
    "alone": ("vLLM alone, nothing cached", "#b8bcc4"),
    "cold": ("{}, nothing stored", "#e08a3c"),
    "warm": ("{}, stored by an earlier visit", "#2f6db5"),
}
_WIDTH = 0.27


def plot(found: dict[str, Any], file: Path) -> None:
    """Draw the time to first token of each turn.

    Args:
        found: The content of `result.json`.
        file: The PNG to write.

    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    by_turn: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in found["per_request"]:
        by_turn[row["turn"]].append(row)
    turns = sorted(by_turn)

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    tallest = max(row[f"ttft_{name}_s"] for row in found["per_request"] for name in _SERIES)
    for index, (name, (label, colour)) in enumerate(_SERIES.items()):
        points = [[row[f"ttft_{name}_s"] for row in by_turn[turn]] for turn in turns]
        places = [turn + (index - 1) * _WIDTH for turn in turns]
        heights = [median(values) for values in points]
        axes.bar(places, heights, _WIDTH * 0.92, color=colour, label=label.format(found["connector"]))
        for place, values, height in zip(places, points, heights, strict=True):
            axes.plot([place] * len(values), values, "o", color="#1d2026", markersize=2.6, alpha=0.7, linestyle="none")
            text = f"{height:.1f} s" if height >= 1 else f"{height:.2f} s"
            # At the foot of a bar that has room for it, else above all that belongs to the bar.
            foot = 0.0 if height > 0.1 * tallest else max(values)
            axes.annotate(
                text, (place, foot), (0, 5), textcoords="offset points", horizontalalignment="center", fontsize=9
            )

    lengths = [round(median(row["prompt_tokens"] for row in by_turn[turn])) for turn in turns]
    axes.set_xticks(turns, [f"turn {turn + 1}\n{length:,} tokens" for turn, length in zip(turns, lengths, strict=True)])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("time to first token, seconds")
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    axes.set_title(
        f"{found['tokens_loaded']:,} of {found['prompt_tokens']:,} prompt tokens loaded instead of computed: "
        f"first token {found['ttft_ratio']:.0f} times sooner",
        fontsize=11,
        loc="left",
    )
    figure.supxlabel(
        f"Bars are medians over {found['conversations']} conversations, dots are requests. vLLM "
        f"{found['versions']['vllm']}, {found['model_parameters'] / 1e6:.0f} M parameters, float32, "
        "one CPU thread, one request at a time.",
        fontsize=8,
        color="#5a606b",
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)
