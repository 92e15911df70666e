"""A tier's calls on blocks: values are sealed on the way out, checked on the way in, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from kvplug.log import RateLimited, get_logger
from kvplug.store.l2.tier import Tier, TierError

if TYPE_CHECKING:
    from kvplug.stats import Stats
    from kvplug.store.l2.blocks import Blocks

__all__ = ["Exchange"]

_limited = RateLimited(get_logger(__name__))

T = TypeVar("T")


class Exchange:
    """Makes calls to a tier, each of which blocks until the tier returns, and raises what the tier raises.

    Args:
        tier: The tier.
        blocks: Seals and checks.
        stats: Counts, under names with the tier's at their end.

    """

    def __init__(self, tier: Tier, blocks: Blocks, stats: Stats) -> None:
        self._tier = tier
        self._blocks = blocks
        self._stats = stats

    def exists(self, names: Sequence[bytes], timeout: float) -> list[bool]:
        """Look up what is called so; one answer for each."""
        found = _as_many([bool(there) for there in self._tier.exists(names, timeout)], names)
        self.count("l2_lookups", len(found))
        self.count("l2_hits", sum(found))
        return found

    def get(self, names: Sequence[bytes], views: Sequence[memoryview], timeout: float) -> list[bool]:
        """Read blocks into memory, header first; say for each whether it is there, whole and the right one."""
        lengths = _as_many(list(self._tier.get(names, views, timeout)), names)
        good = [
            length is not None and self._accept(name, view, length)
            for name, view, length in zip(names, views, lengths, strict=True)
        ]
        damaged = [name for name, length, ok in zip(names, lengths, good, strict=True) if length is not None and not ok]
        if damaged:
            # Else it would stay: a tier needn't write a key that it has.
            with suppress(TierError):
                self._tier.delete(damaged, timeout)
        return good

    def put(self, names: Sequence[bytes], views: Sequence[memoryview], timeout: float) -> list[bool]:
        """Write blocks from memory that has room for a header before each; say for each whether the tier has it."""
        values = [self._blocks.seal(name, view) for name, view in zip(names, views, strict=True)]
        kept = _as_many([bool(there) for there in self._tier.put(names, values, timeout)], names)
        self.count("l2_blocks_written", sum(kept))
        self.count("l2_written_bytes", sum(len(value) for value, there in zip(values, kept, strict=True) if there))
        self.count("l2_writes_refused", len(kept) - sum(kept))
        return kept

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of the tier's counts."""
        if amount:
            self._stats.add(f"{name}:{self._tier.name}", amount)

    def _accept(self, name: bytes, view: memoryview, length: int) -> bool:
        problem = self._blocks.accept(name, view, length)
        if problem is None:
            self.count("l2_blocks_read")
            self.count("l2_read_bytes", length)
            return True
        self.count("l2_damaged")
        _limited.warning(
            (self._tier.name, problem),
            "Block %s from L2 tier %s (%s) is a miss: %s.",
            name.hex()[:16],
            self._tier.name,
            self._tier.place,
            problem.value,
        )
        return False


def _as_many(answers: list[T], names: Sequence[bytes]) -> list[T]:
    if len(answers) != len(names):
        msg = f"the tier answered {len(answers)} of {len(names)} keys"
        raise TierError(msg)
    return answers
