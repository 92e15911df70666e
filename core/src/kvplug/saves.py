"""Which blocks of a request are to be saved after a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplug.kv_groups import alignment_of

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup

__all__ = ["SavePlanner", "SaveProgress"]


@dataclass
class SaveProgress:
    """How far the saves of one request have got."""

    #: By group, blocks from the start that a save has been asked for.
    num_blocks: list[int]
    #: Tokens at which there is the next block to save, of any group.
    next_tokens: int = 0


class SavePlanner:
    """Finds the blocks that are full, and complete, when a step ends, and that have not been saved.

    Args:
        groups: The model's KV-cache groups.

    """

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._groups = tuple(groups)
        #: Whether there is recurrent state.
        self.has_state = any(group.kind == "state" for group in groups)
        self.alignment = alignment_of(self._groups)

    def start(self) -> SaveProgress:
        """Return the progress of a request that starts, or starts again."""
        return SaveProgress([0] * len(self._groups))

    def plan(
        self, progress: SaveProgress, computed: int, known: int, *, exact: bool, starts: bool
    ) -> list[tuple[int, int, int]]:
        """Return ranges of blocks to save, and note that they are.

        Args:
            progress: The request's progress.
            computed: Its tokens that are computed before the step.
            known: Its tokens that are computed when the step ends, as far as they are known already.
            exact: Whether the step ends at `known`.
            starts: Whether the request starts with this step, or starts again. Then all of its blocks are its own;
                later, blocks behind a window may be somebody else's.

        Returns:
            Group, first block, and block after the last, of each range.

        """
        ranges = []
        following = []
        for group in self._groups:
            size, saved = group.block_size, progress.num_blocks[group.index]
            end = known // size
            first = saved
            if group.kind == "state":
                # A block has the state at its end only if the step ended there.
                first = max(saved, computed // size) if group.every_block else end - 1
                if not group.every_block and (not exact or known % size or first < saved):
                    first = end
            elif group.kind != "full" and not starts:
                # One block more: it may have been full, with tokens that weren't accepted yet.
                first = max(saved, computed // size - 1)
            if first < end:
                ranges.append((group.index, first, end))
            progress.num_blocks[group.index] = max(saved, end)
            following.append((max(saved, end) + 1) * size)
        progress.next_tokens = min(following)
        return ranges
