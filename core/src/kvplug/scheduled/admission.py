"""Keeps requests that are loading from blocking each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup

__all__ = ["Admission"]


class Admission:
    """Keeps requests that are loading from holding all blocks, so that none of them can start.

    A request that waits for its load has blocks and can't be preempted. If several have, and none gets the blocks that
    it lacks, nothing runs any more.

    Args:
        groups: The model's KV-cache groups.
        num_blocks: Blocks in the paged cache; None for no limit.

    """

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int | None) -> None:
        self._groups = tuple(groups)
        self._num_blocks = num_blocks
        self._needed: dict[str, int] = {}

    def allows(self, request: Any) -> bool:
        """Say whether one more request may be loaded while it waits."""
        if self._num_blocks is None or not self._needed:
            return True
        needed = sum(self._needed.values()) + self._of(request)
        return needed < self._num_blocks  # one is the null block

    def started(self, request: Any) -> None:
        """Note that a request is being loaded."""
        self._needed[request.request_id] = self._of(request)

    def ended(self, request_id: str) -> None:
        """Note that a request runs, or has ended."""
        self._needed.pop(request_id, None)

    def _of(self, request: Any) -> int:
        tokens = len(request.all_token_ids) + 1
        return sum(-(-tokens // group.block_size) for group in self._groups)
