"""In which order a request's blocks are looked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from kvplug.kv_groups import alignment_of

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup

__all__ = ["BlockOrder"]

T = TypeVar("T")


class BlockOrder:
    """Puts the blocks of all KV-cache groups into one row, by the tokens at which they end, and then by group.

    So what is there of a request is a run from the start of one row, whatever groups the model has: a block that is
    missing in any group ends it.

    That a group with a sliding window needs only the blocks in the window to go on is of no use here. vLLM doesn't
    know that a step gets shorter. It has given all groups blocks for all of the step's tokens, and offers those blocks
    to other requests as soon as the step is scheduled (`cache_blocks`), shorter prefixes of the same tokens included.
    Each of them has to hold what it would hold had it been computed. And ranks may agree on less than this one has
    loaded: whatever they agree on, the blocks in the window before it are there.

    Args:
        groups: The model's KV-cache groups, all of attention.

    """

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._sizes = tuple(group.block_size for group in groups)
        self._alike = len(set(self._sizes)) == 1
        #: Tokens at whose multiples all groups have whole blocks.
        self.alignment = alignment_of(tuple(groups))

    def pick(self, by_group: Sequence[Sequence[T]], start: int, end: int) -> tuple[T, ...]:
        """Return what there is for each block that covers some of a range of tokens, in order.

        Args:
            by_group: By group, something for each block of the request.
            start: The first token. A block that it is in the middle of is one of them.
            end: The token after the last, a multiple of `alignment`.

        """
        parts = [items[start // size : end // size] for items, size in zip(by_group, self._sizes, strict=True)]
        if len(parts) == 1:
            return tuple(parts[0])
        if self._alike:
            return tuple(chain.from_iterable(zip(*parts, strict=True)))
        placed = sorted(
            ((start // size + index + 1) * size, group, index)
            for group, (size, part) in enumerate(zip(self._sizes, parts, strict=True))
            for index in range(len(part))
        )
        return tuple(parts[group][index] for _, group, index in placed)

    def groups(self, start: int, end: int) -> tuple[int, ...]:
        """Return the group of each block that `pick` returns something for; nothing if there is only one group."""
        if len(self._sizes) == 1:
            return ()
        return self.pick([[group] * (end // size) for group, size in enumerate(self._sizes)], start, end)

    def usable(
        self, start: int, groups: Sequence[int], *, wanted: int, found: int, dropped: int = 0
    ) -> tuple[int, int]:
        """Say how far a request gets with the first of the blocks that were wanted.

        Args:
            start: The first token.
            groups: The group of each block, as `groups` returned it.
            wanted: How many blocks were wanted: at least one.
            found: How many of them are there, from the first on, without a gap.
            dropped: How many tokens at the end aren't to be used, a multiple of `alignment`.

        Returns:
            How many of these are of use, and the tokens up to which they cover all groups: a multiple of `alignment`.

        """
        ends: Sequence[int]
        if groups:
            covered = [start // size * size for size in self._sizes]
            ends = []
            for group in groups:
                covered[group] += self._sizes[group]
                ends.append(covered[group])
        else:
            size = self._sizes[0]
            first = (start // size + 1) * size
            ends = range(first, first + wanted * size, size)
        # What ends before the first block that is missing is there, in every group.
        tokens = ends[-1] if found == wanted else (ends[found] - 1) // self.alignment * self.alignment
        tokens -= dropped
        return bisect_right(ends, tokens), tokens
