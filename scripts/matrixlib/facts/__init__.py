"""The facts, in the order of a step: what the scheduler sends, who is asked, what the runner does with it."""

from __future__ import annotations

from matrixlib.fact import Fact
from matrixlib.facts import connectors, outputs, processes, runners

__all__ = ["FACTS"]

FACTS: tuple[Fact, ...] = (*outputs.FACTS, *processes.FACTS, *runners.FACTS, *connectors.FACTS)
