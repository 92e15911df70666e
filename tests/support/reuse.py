"""What tests of reuse on real engines have in common: prompts, the negative control, what must be left: nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from support.llm import Output, compare

if TYPE_CHECKING:
    from support.driver import Result, Round

#: How far log-probabilities may be apart in float32 where a hit changes how tokens are split into steps.
CLOSE = 1e-5


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return a prompt that shares nothing with those of other seeds."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def assert_differ(outputs: Sequence[Output], expected: Sequence[Output], *, atol: float = CLOSE) -> None:
    """Demand that a comparison fails: the control of one that passed.

    Raises:
        AssertionError: it passes.
    """
    try:
        compare(outputs, expected, atol=atol)
    except AssertionError as error:
        if "request" not in str(error):
            raise
        return
    raise AssertionError("spoilt blocks changed nothing")


def assert_nothing_left(result: Result) -> None:
    """Demand that nothing is held for requests that are gone."""
    assert result.leftovers
    assert not any(result.leftovers.values()), result.leftovers


def hits(rounds: Sequence[Round]) -> list[int]:
    """Return the tokens that were promised in each round."""
    return [round_.counts["prefix_cache_hits"] for round_ in rounds]


def loaded(rounds: Sequence[Round]) -> list[int]:
    """Return the blocks that were loaded in each round."""
    return [round_.counts["blocks_loaded"] for round_ in rounds]
