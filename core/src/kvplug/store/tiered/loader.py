"""Bringing blocks from L2 into L1: those that a request waits for, and those that one will want soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kvplug.store.tiered.writer import batches

if TYPE_CHECKING:
    from kvplug.stats import Stats
    from kvplug.store.allocator import SlotRef
    from kvplug.store.l2.client import L2Client
    from kvplug.store.l2.operation import Operation
    from kvplug.store.memory import MemoryTier
    from kvplug.store.tiered.writer import Writer

__all__ = ["Loader", "Prefetch"]

#: Where a block is that is in L1 already, or on its way there.
_HERE = -1


class _Batch:
    """Blocks that one call brings from one tier."""

    def __init__(self, keys: Sequence[bytes], refs: Sequence[SlotRef], client: L2Client) -> None:
        self.keys = keys
        self.refs = refs
        self.client = client
        self.operation: Operation[list[bool]] | None = None
        self.started = time.monotonic()
        #: Set when the blocks are in L1, as far as they could be had.
        self.settled = threading.Event()


class Prefetch:
    """What one call of `Loader.prefetch` has begun.

    Attributes:
        last: The last block that was asked for; None if none was.
        left_out: Blocks that weren't asked for, since too much is on its way. See `Loader.go_on`.
        only_last: See `Loader.prefetch`.

    """

    def __init__(self, *, only_last: bool = False) -> None:
        self.last: bytes | None = None
        self.left_out: Sequence[bytes] = ()
        self.only_last = only_last
        self._batches: list[_Batch] | None = None

    def started(self, batches: list[_Batch]) -> None:
        """Note that lookups have ended, and what is read as a result. For the loader."""
        self._batches = batches

    @property
    def tiers(self) -> frozenset[str]:
        """Names of the tiers from which something has come, or will."""
        return frozenset(batch.client.name for batch in self._batches or ())

    @property
    def over(self) -> bool:
        """Whether all is in L1 that will come."""
        return self._batches is not None and all(batch.settled.is_set() for batch in self._batches)


class _Budget:
    """Bounds how many blocks are on their way for requests that wait."""

    def __init__(self, blocks: int) -> None:
        self._left = blocks
        self._lock = threading.Lock()

    def take(self, blocks: int) -> _Share:
        """Take as many as there are, up to so many."""
        with self._lock:
            taken = max(0, min(blocks, self._left))
            self._left -= taken
        return _Share(self, taken)

    def give_back(self, share: _Share, blocks: int) -> None:
        with self._lock:
            blocks = min(blocks, share.blocks)
            share.blocks -= blocks
            self._left += blocks


class _Share:
    """Blocks of a budget that one request has."""

    def __init__(self, budget: _Budget, blocks: int) -> None:
        self._budget = budget
        self.blocks = blocks

    def leave(self, blocks: int) -> None:
        """Give blocks back, but no more than are left."""
        self._budget.give_back(self, blocks)


class Loader:
    """Promotes blocks from L2 tiers, in order of the tiers and of the keys, never beyond the first gap.

    Each block that isn't in L1 is looked up once in each tier, until one has it. Only what was found is given slots.
    A block that comes too late for the request that waited is in L1 for the next one.

    Args:
        memory: L1.
        clients: The tiers, the one to ask first first. Behind those that the writer has, there may be others that read
            what other engines have stored: for each kind of engine one for each tier, in the same order.
        writer: Gives out slots.
        stats: Counts what happens.
        prefetch_bytes: Bytes that may be on their way for requests that nobody waits for yet.

    """

    def __init__(
        self,
        memory: MemoryTier,
        clients: Sequence[L2Client],
        writer: Writer,
        stats: Stats,
        *,
        prefetch_bytes: int = 256 << 20,
    ) -> None:
        self._allocator = memory.allocator
        self._clients = list(clients)
        self._writer = writer
        self._stats = stats
        self._value_bytes = memory.slab.header_bytes + memory.slab.slot_bytes
        self._max_blocks = prefetch_bytes // self._value_bytes
        self._budget = _Budget(self._max_blocks)
        self._lock = threading.Lock()
        self._coming: dict[bytes, _Batch] = {}

    def fetch(self, keys: Sequence[bytes], until: float) -> None:
        """Bring a run of blocks into L1, as far as it can be had in time.

        Args:
            keys: Block keys, in order. The run that is brought ends at the first that no tier has.
            until: When to stop waiting, by `time.monotonic`.

        """
        where: list[int | None] = [_HERE if self._is_here(key) else None for key in keys]
        for number, client in enumerate(self._clients):
            asked = [index for index, place in enumerate(where) if place is None]
            if not asked or time.monotonic() >= until:
                break
            operation = client.exists([keys[index] for index in asked])
            if not operation.wait(until):
                self._stats.add("l2_load_timeouts")
                break
            self._note(where, asked, operation.result, number)
        run = _run(where)
        # What L1 has behind a gap must not make room for what fills the gap. It is used when the gap is filled.
        here = [key for key, place in zip(keys, run, strict=False) if place == _HERE]
        held = [ref for key in here for ref in self._allocator.pin_prefix([key], used=False)]
        try:
            self._wait_in_order(keys[: len(run)], self._start(keys, run), until)
        finally:
            self._allocator.unpin(held)

    def prefetch(self, keys: Sequence[bytes], *, only_last: bool = False) -> Prefetch:
        """Begin to bring a run of blocks into L1. Returns at once, and never fails; what is too much is left out.

        Args:
            keys: Block keys, in order, of a request that will be scheduled soon.
            only_last: Bring the last block that a tier has, instead of the run up to the first that none has.

        """
        prefetch = self._prefetch_last(keys) if only_last else self._prefetch_run(keys)
        if prefetch.left_out:
            self._stats.add("l2_prefetches_dropped", len(prefetch.left_out))
        return prefetch

    def go_on(self, prefetch: Prefetch) -> Prefetch | None:
        """Begin to bring what a prefetch that is over has left out.

        Returns:
            The next prefetch, which may have left out all again; None if nothing was left out, if what has come ends
            before that, or if there is no room for prefetches at all.

        """
        if not prefetch.left_out or not self._max_blocks:
            return None
        if prefetch.only_last:
            return self._prefetch_last(prefetch.left_out)
        if prefetch.last is not None and not self._is_here(prefetch.last):
            return None
        return self._prefetch_run(prefetch.left_out)

    def _prefetch_run(self, keys: Sequence[bytes]) -> Prefetch:
        prefetch = Prefetch()
        first = next((index for index, key in enumerate(keys) if not self._is_here(key)), len(keys))
        wanted = keys[first:]
        share = self._budget.take(len(wanted))
        chosen = wanted[: share.blocks]
        prefetch.left_out = wanted[len(chosen) :]
        if chosen:
            prefetch.last = chosen[-1]
            where: list[int | None] = [_HERE if self._is_here(key) else None for key in chosen]
            self._look_up(chosen, where, 0, share, prefetch)
        else:
            prefetch.started([])
        return prefetch

    def _prefetch_last(self, keys: Sequence[bytes]) -> Prefetch:
        prefetch = Prefetch(only_last=True)
        # What is after the last one that is here already may be better.
        here = next((index for index in range(len(keys) - 1, -1, -1) if self._is_here(keys[index])), -1)
        wanted = keys[here + 1 :]
        share = self._budget.take(min(1, len(wanted)))
        if share.blocks:
            self._look_up(wanted, [None] * len(wanted), 0, share, prefetch)
        else:
            prefetch.left_out = wanted
            prefetch.started([])
        return prefetch

    def is_coming(self, key: bytes) -> bool:
        """Say whether a block is on its way from L2."""
        return key in self._coming

    def coming(self, key: bytes, max_age: float) -> bool:
        """Say whether a block is on its way from L2, and was asked for at most so many seconds ago."""
        batch = self._coming.get(key)
        return batch is not None and time.monotonic() - batch.started < max_age

    def forget(self) -> None:
        """Wait no more for what is on its way: it will not be found. For a reset."""
        with self._lock:
            coming, self._coming = self._coming, {}
        self._cancel(coming.values())

    # -- Lookups -------------------------------------------------------------------------------------------------

    def _is_here(self, key: bytes) -> bool:
        return key in self._coming or self._allocator.prefix_length([key]) > 0

    @staticmethod
    def _note(where: list[int | None], asked: Sequence[int], found: Sequence[bool], number: int) -> None:
        for index, there in zip(asked, found, strict=True):
            if there:
                where[index] = number

    def _look_up(
        self,
        keys: Sequence[bytes],
        where: list[int | None],
        number: int,
        share: _Share,
        prefetch: Prefetch,
    ) -> None:
        """Ask the tiers from one on in the background, then start reading."""
        asked = [index for index, place in enumerate(where) if place is None]
        try:
            if not asked or number == len(self._clients):
                started = self._start(*(_last(keys, where) if prefetch.only_last else (keys, _run(where))), share)
                on_their_way = sum(len(batch.keys) for batch in started)
                self._stats.add("l2_prefetched", on_their_way)
                share.leave(len(keys) - on_their_way)
                prefetch.started(started)
                return

            def released(found: list[bool] | None) -> None:
                self._note(where, asked, found or [False] * len(asked), number)
                self._look_up(keys, where, number + 1, share, prefetch)

            self._clients[number].exists([keys[index] for index in asked], urgent=False, released=released)
        except BaseException:
            share.leave(len(keys))
            prefetch.started([])
            raise

    # -- Reading -------------------------------------------------------------------------------------------------

    def _start(self, keys: Sequence[bytes], run: Sequence[int], share: _Share | None = None) -> list[_Batch]:
        """Give slots to the blocks of a run that aren't here yet, and start reading them.

        Each block gives its part of the share back when it is here; without a share somebody waits for them.
        """
        started: list[_Batch] = []
        missing = [(key, place) for key, place in zip(keys, run, strict=False) if place != _HERE]
        for place, same in groupby(missing, key=lambda pair: pair[1]):
            client = self._clients[place]
            for batch in batches([key for key, _ in same], self._value_bytes, client.tier.max_calls):
                refs = self._writer.reserve(batch)
                pairs = [(key, ref) for key, ref in zip(batch, refs, strict=True) if ref is not None]
                if pairs:
                    started.append(self._read(place, client, pairs, share))
                if any(ref is None and not self._is_here(key) for key, ref in zip(batch, refs, strict=True)):
                    return started  # no slot to be had, and what comes after a gap is of no use
        return started

    def _read(
        self, place: int, client: L2Client, pairs: Sequence[tuple[bytes, SlotRef]], share: _Share | None
    ) -> _Batch:
        keys, refs = zip(*pairs, strict=True)
        batch = _Batch(keys, refs, client)
        with self._lock:
            self._coming.update((key, batch) for key in keys)

        def released(found: list[bool] | None) -> None:
            try:
                there = found or [False] * len(refs)
                self._allocator.abandon([ref for ref, ok in zip(refs, there, strict=True) if not ok])
                self._writer.publish([ref for ref, ok in zip(refs, there, strict=True) if ok], found_in=place)
            finally:
                with self._lock:
                    for key in keys:
                        if self._coming.get(key) is batch:
                            del self._coming[key]
                if share is not None:
                    share.leave(len(keys))
                batch.settled.set()

        try:
            slots = [ref.slot for ref in refs]
            batch.operation = client.get(keys, slots, urgent=share is None, released=released)
        except BaseException:
            released(None)
            raise
        return batch

    def _wait_in_order(self, keys: Sequence[bytes], started: Sequence[_Batch], until: float) -> None:
        """Wait for the blocks of a run, those included that others have asked for, up to the first that is missing."""
        for key in keys:
            batch = self._coming.get(key)
            if batch is not None:
                operation = batch.operation
                if operation is not None and not operation.urgent:
                    batch.client.hasten(operation)
                if not batch.settled.wait(max(0.0, until - time.monotonic())):
                    self._stats.add("l2_load_timeouts")
                    break
            if not self._allocator.prefix_length([key]):
                break
        else:
            return
        self._cancel(started)

    @staticmethod
    def _cancel(started: Iterable[_Batch]) -> None:
        for batch in started:
            if batch.operation is not None:
                batch.client.cancel([batch.operation])


def _run(where: Sequence[int | None]) -> list[int]:
    """Return the places of the leading blocks, up to the first that is nowhere."""
    run = []
    for place in where:
        if place is None:
            break
        run.append(place)
    return run


def _last(keys: Sequence[bytes], where: Sequence[int | None]) -> tuple[list[bytes], list[int]]:
    """Return the last block that is anywhere, and its place; nothing if there is none."""
    for key, place in zip(reversed(keys), reversed(where), strict=True):
        if place is not None:
            return [key], [place]
    return [], []
