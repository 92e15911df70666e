"""Process-wide parallel state of vLLM, as one simulated rank would see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

__all__ = ["Rank"]

_NAMES = ("_TP", "_PP", "_DCP", "_PCP", "_WORLD")


class Rank:
    """A rank's place among the others.

    Args:
        rank: The rank.
        tensor_parallel: Ranks per stage.
        pipeline_parallel: Stages.
    """

    def __init__(self, rank: int, tensor_parallel: int, pipeline_parallel: int) -> None:
        self.rank = rank
        self.tensor_rank, self.stage = rank % tensor_parallel, rank // tensor_parallel
        self.is_last_stage = self.stage == pipeline_parallel - 1
        first = self.stage * tensor_parallel
        self._groups = {
            "_TP": _group(rank, list(range(first, first + tensor_parallel))),
            "_PP": _group(rank, list(range(self.tensor_rank, tensor_parallel * pipeline_parallel, tensor_parallel))),
            "_DCP": _group(rank, [rank]),
            "_PCP": _group(rank, [rank]),
            "_WORLD": _group(rank, list(range(tensor_parallel * pipeline_parallel))),
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make vLLM's functions for ranks and world sizes answer for this rank."""
        from vllm.distributed import parallel_state

        before = {name: getattr(parallel_state, name) for name in _NAMES if hasattr(parallel_state, name)}
        for name in before:
            setattr(parallel_state, name, self._groups[name])
        try:
            yield
        finally:
            for name, group in before.items():
                setattr(parallel_state, name, group)


def _group(rank: int, ranks: list[int]) -> Any:
    index = ranks.index(rank)
    return SimpleNamespace(
        rank=rank,
        ranks=ranks,
        rank_in_group=index,
        local_rank=rank,
        world_size=len(ranks),
        is_first_rank=index == 0,
        is_last_rank=index == len(ranks) - 1,
        first_rank=ranks[0],
        last_rank=ranks[-1],
    )
