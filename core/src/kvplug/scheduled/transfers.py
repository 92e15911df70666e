"""Loads and saves that the workers haven't all ended, as the scheduler half knows them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplug.store import SlotRef
    from kvplug.store.directed import DirectedStore

__all__ = ["Transfers"]

#: Seconds after the last start of a transfer for which an idle engine is kept stepping until all have ended.
_IDLE_SECONDS = 30.0


@dataclass
class _Transfer:
    refs: Sequence[SlotRef]
    ranks_left: int
    #: For a load, the request's id; for a save, the blocks of the paged cache that are read.
    request_id: str = ""
    block_ids: Collection[int] = ()
    failed: bool = False


class Transfers:
    """Gives slots back when all ranks have ended a load or save, each once.

    Reports of transfers that aren't known, or that all ranks have reported before, change nothing.

    Args:
        store: The store.
        num_ranks: Workers.

    """

    def __init__(self, store: DirectedStore, num_ranks: int) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._numbers = count()
        self._loads: dict[int, _Transfer] = {}
        self._saves: dict[int, _Transfer] = {}
        # Which save reads a block of the paged cache.
        self._read_by: dict[int, int] = {}
        self._last_start = float("-inf")

    def __len__(self) -> int:
        """Count the transfers under way."""
        return len(self._loads) + len(self._saves)

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return len(self._loads)

    @property
    def keeps_stepping(self) -> bool:
        """Whether transfers are under way that an idle engine should see the end of.

        Loads, too: of a request that was aborted, vLLM frees the blocks when its load is reported.
        """
        return len(self) > 0 and time.monotonic() - self._last_start < _IDLE_SECONDS

    def start_load(self, request_id: str, refs: Sequence[SlotRef]) -> int:
        """Take over pinned slots until a load has ended, and return its number."""
        number = next(self._numbers)
        self._loads[number] = _Transfer(refs, self._num_ranks, request_id)
        self._last_start = time.monotonic()
        return number

    def start_save(self, block_ids: Collection[int], refs: Sequence[SlotRef]) -> int:
        """Take over reserved slots until a save has ended, and return its number."""
        number = next(self._numbers)
        self._saves[number] = _Transfer(refs, self._num_ranks, block_ids=block_ids)
        self._read_by.update(dict.fromkeys(block_ids, number))
        self._last_start = time.monotonic()
        return number

    def reading(self, block_ids: Iterable[int]) -> set[int]:
        """Return the saves under way that read any of these blocks."""
        if not self._read_by:
            return set()
        return {number for block in block_ids if (number := self._read_by.get(block)) is not None}

    @property
    def saves(self) -> Collection[int]:
        """The saves under way."""
        return self._saves.keys()

    def loads_ended(self, reports: Mapping[int, tuple[int, bool]]) -> list[tuple[str, bool]]:
        """Take in what ranks report of loads: how many ranks, and whether it failed for one of them.

        Returns:
            Ids of the requests whose load has ended now, and whether it has failed.

        """
        ended = []
        for load in _ended(self._loads, reports):
            self._store.unpin(load.refs)
            ended.append((load.request_id, load.failed))
        return ended

    def saves_ended(self, reports: Mapping[int, tuple[int, bool]]) -> None:
        """Take in what ranks report of saves, as `loads_ended`. What all have saved can be found from now on."""
        saved: list[SlotRef] = []
        for save in _ended(self._saves, reports):
            for block in save.block_ids:
                # A later save may read it, too, and may be in the same report.
                if self._read_by.get(block) not in self._saves:
                    self._read_by.pop(block, None)
            if save.failed:
                self._store.abandon(save.refs)
            else:
                saved += save.refs
        if saved:
            self._store.publish(saved)


def _ended(transfers: dict[int, _Transfer], reports: Mapping[int, tuple[int, bool]]) -> list[_Transfer]:
    ended = []
    for number, (ranks, failed) in reports.items():
        transfer = transfers.get(number)
        if transfer is None:
            continue
        transfer.ranks_left -= ranks
        transfer.failed |= failed
        if transfer.ranks_left <= 0:
            ended.append(transfers.pop(number))
    return ended
