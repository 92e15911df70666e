"""What the scheduler's side of a store tells the workers to do with L2 tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """One call to a tier, for every rank to make with its own part of the blocks."""

    #: What the answer refers to.
    number: int
    #: The number of resets before it. A command from before a worker's last reset isn't carried out.
    epoch: int
    #: Which of the tiers, in the order of the setting `l2`; behind them, the same again for each kind of peer.
    tier: int
    #: `exists`; `get` into slots; `put` from slots; `spill`: put from slots that are overwritten in this step.
    kind: Literal["exists", "get", "put", "spill"]
    #: Block keys.
    keys: tuple[bytes, ...]
    #: As many slots; none for `exists`.
    slots: tuple[int, ...] = ()
    #: Whether somebody waits.
    urgent: bool = False
    #: For `put`: the number of the save, of the same step, by which the slots get their contents.
    after: int | None = None
