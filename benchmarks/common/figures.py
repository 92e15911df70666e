"""What a measurement yields, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Figure", "as_json", "as_table", "spread"]


@dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
        name: Its key in the JSON line.
        value: The number.
        unit: What it counts; empty for a ratio.
        at_most: The limit, if there is one.
        at_least: The limit, if there is one.
        detail: What it consists of.

    """

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    detail: str = ""

    @property
    def limit(self) -> str:
        """The limit as text."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"

    @property
    def met(self) -> bool:
        """Whether the number is within its limit."""
        # Written so that a NaN meets nothing.
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    @property
    def rounded(self) -> float:
        """The number with the four digits that may mean something."""
        return float(f"{self.value:.4g}")


def as_table(figures: Iterable[Figure]) -> str:
    """Return the figures as a table, those beyond their limits marked."""
    rows = [
        (
            figure.name,
            f"{figure.rounded:g} {figure.unit}".rstrip(),
            figure.limit,
            f"{'' if figure.met else 'MISSED  '}{figure.detail}",
        )
        for figure in figures
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        f"{name:{widths[0]}}  {value:>{widths[1]}}  {limit:{widths[2]}}  {detail}".rstrip()
        for name, value, limit, detail in rows
    )


def as_json(figures: Iterable[Figure]) -> str:
    """Return the figures as one line of JSON."""
    return json.dumps({figure.name: figure.rounded for figure in figures})


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 3) -> str:
    """Return number, smallest, median and largest of some values, as text."""
    low, middle, high = (f"{value * scale:.{digits}g}" for value in (min(values), median(values), max(values)))
    return f"{len(values)} runs: {low} to {high}, median {middle}"
