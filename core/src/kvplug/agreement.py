"""Agreement of tensor-parallel ranks on how much of a step is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

__all__ = ["Agreement"]

#: How long a rank waits for the others: as long as vLLM gives a worker for a whole step.
TIMEOUT = timedelta(seconds=300)


class Agreement:
    """A process group of the tensor-parallel ranks, for one small all-reduce a step on the CPU.

    The group is its own, so that its collectives can't meet vLLM's from another thread. Creating it is a collective
    itself: all ranks do it at their first step.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        """Create the group.

        Args:
            ranks: Global ranks of the tensor-parallel group, this process's own included. One rank agrees with itself.

        """
        self._group: Any = None
        if len(ranks) > 1:
            import torch.distributed as dist

            # Only the members take part: other engines' ranks may share the world (data parallelism).
            self._group = dist.new_group(
                list(ranks), backend="gloo", timeout=TIMEOUT, use_local_synchronization=True, group_desc="kvplug"
            )

    def minimum(self, counts: Sequence[int]) -> list[int]:
        """Return, for each place, the smallest count over the ranks.

        Args:
            counts: The same number of counts, for the same requests in the same order, on every rank.

        Raises:
            RuntimeError: A rank didn't answer. Ranks that disagree would compute different steps, so there is
                nothing to go on with.

        """
        if self._group is None or not counts:
            return list(counts)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(list(counts), dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        result: list[int] = tensor.tolist()
        return result
