"""Compares a release with all facts."""

from __future__ import annotations

from collections.abc import Sequence

from matrixlib.fact import Fact
from matrixlib.facts import FACTS
from matrixlib.reading import Sources

__all__ = ["contract"]


def contract(sources: Sources, runners: Sequence[str], facts: Sequence[Fact] = FACTS) -> dict[str, list[str]]:
    """Return, for each model runner, a sentence for every fact that isn't with this release as it is declared.

    Args:
        sources: A release's sources.
        runners: The model runners that take connectors in this release.
        facts: What to compare with.

    """
    wanted = [fact for fact in facts if not set(runners).isdisjoint(fact.runners)]
    problems = [(fact, problem) for fact in wanted if (problem := fact.problem(sources)) is not None]
    return {runner: [problem for fact, problem in problems if runner in fact.runners] for runner in runners}
