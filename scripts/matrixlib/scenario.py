"""A few steps of a scheduler that have everything in them that hooks are about, and what hooks must see of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["BLOCK_SIZE", "PROMPTS", "STEPS", "Blocks", "Cached", "New", "Resumed", "Seen", "Step"]

#: Block ids of a request, one tuple per KV-cache group. There are two groups.
Blocks = tuple[tuple[int, ...], tuple[int, ...]]

#: Tokens per block, in both groups.
BLOCK_SIZE = 16
#: Tokens in each request's prompt.
PROMPTS = {"a": 100, "b": 50, "c": 20, "d": 20}


@dataclass(frozen=True)
class New:
    """A request that is scheduled for the first time."""

    computed: int
    scheduled: int
    blocks: Blocks


@dataclass(frozen=True)
class Resumed(New):
    """A request that is scheduled again after a preemption, with other blocks."""

    #: Tokens that it had generated.
    outputs: int = 1


@dataclass(frozen=True)
class Cached:
    """A request that goes on."""

    computed: int
    scheduled: int
    new_blocks: Blocks | None = None


@dataclass(frozen=True)
class Seen:
    """What a hook sees of a request."""

    block_ids: Blocks
    skippable: int


@dataclass(frozen=True)
class Step:
    """One step: what the scheduler sends, what a connector loads, and what comes of it."""

    name: str
    requests: Mapping[str, New | Resumed | Cached] = field(default_factory=dict)
    preempted: tuple[str, ...] = ()
    #: Whether releases before 0.25.1 leave the preempted requests out.
    reset: bool = False
    finished: tuple[str, ...] = ()
    #: Speculative tokens among those scheduled, by request.
    drafts: Mapping[str, int] = field(default_factory=dict)
    #: Requests for which an encoder runs.
    encoded: tuple[str, ...] = ()
    zeroed: tuple[int, ...] = ()
    #: Blocks that are copied over.
    overwritten: tuple[int, ...] = ()
    #: What the hook returns.
    loaded: Mapping[str, int] = field(default_factory=dict)
    #: What hooks see, by request.
    seen: Mapping[str, Seen] = field(default_factory=dict)
    #: Tokens that the runner is spared.
    skipped: Mapping[str, int] = field(default_factory=dict)
    #: Of the blocks above, those that are still zeroed and copied over.
    still_zeroed: tuple[int, ...] = ()
    still_overwritten: tuple[int, ...] = ()


_A1: Blocks = ((1, 2, 3, 4), (11, 12, 13, 14))
_A2: Blocks = ((21, 22, 23), (24, 25, 26))
_A: Blocks = (_A1[0] + _A2[0], _A1[1] + _A2[1])
_B: Blocks = ((5, 6, 7, 8), (15, 16, 17, 18))
_C: Blocks = ((5, 6), (15, 16))
_A_AGAIN: Blocks = ((31, 32, 33, 34, 35, 36, 37), (41, 42, 43, 44, 45, 46, 47))
_B_AGAIN: Blocks = ((7, 8, 5, 6), (17, 18, 15, 16))
_D: Blocks = ((71, 72), (81, 82))
_B_LAST: Blocks = ((51, 52, 53, 54), (61, 62, 63, 64))

STEPS = (
    Step(
        "two requests begin, one of them with a prefix that vLLM has",
        requests={"a": New(0, 64, _A1), "b": New(16, 34, _B)},
        finished=("z",),
        zeroed=(1, 2, 3, 4, 30),
        overwritten=(2, 29),
        loaded={"a": 32, "b": 1000, "unknown": 5},
        seen={"a": Seen(_A1, 63), "b": Seen(_B, 33)},
        skipped={"a": 32, "b": 33},
        still_zeroed=(3, 4, 30),
        still_overwritten=(29,),
    ),
    Step(
        "a second chunk is shortened, and another request decodes",
        requests={"a": Cached(64, 36, _A2), "b": Cached(50, 1)},
        zeroed=(21, 22),
        overwritten=(22,),
        loaded={"a": 16, "b": 1},
        seen={"a": Seen(_A, 35), "b": Seen(_B, 0)},
        skipped={"a": 16},
        still_zeroed=(22,),
        still_overwritten=(22,),
    ),
    Step(
        "a request loses its blocks to a new one",
        requests={"a": Cached(100, 1), "c": New(0, 20, _C)},
        preempted=("b",),
        zeroed=(5, 6),
        overwritten=(6,),
        loaded={"c": 16},
        seen={"a": Seen(_A, 0), "c": Seen(_C, 19)},
        skipped={"c": 16},
        still_zeroed=(6,),
        still_overwritten=(6,),
    ),
    Step("there is nothing to compute, and a request loses its blocks", preempted=("a",), finished=("c",)),
    Step(
        "both come back with other blocks",
        requests={"a": Resumed(0, 102, _A_AGAIN, 2), "b": Resumed(0, 51, _B_AGAIN)},
        zeroed=(5, 7),
        overwritten=(5, 7),
        loaded={"a": 102, "b": 16},
        seen={"a": Seen(_A_AGAIN, 101), "b": Seen(_B_AGAIN, 50)},
        skipped={"a": 101, "b": 16},
        still_zeroed=(5,),
        still_overwritten=(5,),
    ),
    Step(
        "a reset takes a request's blocks, and it comes back at once",
        requests={"a": Cached(102, 1), "b": Resumed(0, 52, _B_LAST, 2)},
        preempted=("b",),
        reset=True,
        loaded={"b": 48},
        seen={"a": Seen(_A_AGAIN, 0), "b": Seen(_B_LAST, 51)},
        skipped={"b": 48},
    ),
    Step(
        "nothing that is loaded can be used",
        requests={"a": Cached(103, 3), "b": Cached(52, 1), "d": New(0, 20, _D)},
        drafts={"a": 2},
        encoded=("d",),
        zeroed=(71,),
        overwritten=(71,),
        loaded={"a": 2, "d": 16},
        seen={"a": Seen(_A_AGAIN, 0), "b": Seen(_B_LAST, 0), "d": Seen(_D, 0)},
        still_zeroed=(71,),
        still_overwritten=(71,),
    ),
)
