"""Which blocks of L1 go to L2, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from kvplug.store.tiered.notes import SlotNotes

if TYPE_CHECKING:
    from kvplug.stats import Stats
    from kvplug.store.allocator import SlotRef
    from kvplug.store.l2.client import L2Client
    from kvplug.store.memory import MemoryTier
    from kvplug.store.slab import Slab

__all__ = ["MAX_TIERS", "Copies", "WritePolicy", "Writer", "batches"]

T = TypeVar("T")

#: What goes to L2: everything that is saved, what is used again, or what L1 evicts.
WritePolicy = Literal["all", "hits", "evicted"]

#: L2 tiers that one store can have.
MAX_TIERS = 8

#: Bytes of one call to a tier: enough for several calls at the same time, not so many that one takes long.
_CALL_BYTES = 16 << 20


class Copies:
    """Copies of blocks that were evicted, in memory that is used again and again.

    Args:
        slab: Where the blocks are.

    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._free: list[memoryview] = []

    def take(self, slot: int) -> memoryview:
        """Return a copy of what is in a slot, header first."""
        view = self._slab.value_view(slot)
        copy = self._free.pop() if self._free else memoryview(bytearray(view.nbytes))
        # numpy copies without the interpreter's lock.
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(view, np.uint8))
        return copy

    def give_back(self, copy: memoryview) -> None:
        """Take a copy back that nobody reads any more."""
        self._free.append(copy)


@dataclass
class _Scratch:
    """A copy of a block that was evicted, until the last tier has it."""

    key: bytes
    memory: memoryview
    readers: int = 0


class Writer:
    """Gives out slots of L1, and writes blocks to L2 as the policy says.

    A block goes to each tier that doesn't have it. For each tier, a bounded number of bytes is in flight; what goes
    beyond that is dropped and counted, and may be written when it is used again.

    Blocks are written from their slots, which stay pinned meanwhile. Evicted ones can't stay, so they are copied.

    Args:
        memory: L1.
        clients: The tiers, at most `MAX_TIERS`.
        stats: Counts what is dropped.
        policy: What goes to L2.
        min_hits: For the policy `hits`: uses after which a block goes.
        max_bytes: Bytes in flight to each tier.
        renew: Called in a reset: from now on blocks have other names.
        copies: Makes copies of evicted blocks.

    """

    def __init__(
        self,
        memory: MemoryTier,
        clients: Sequence[L2Client],
        stats: Stats,
        *,
        policy: WritePolicy = "all",
        min_hits: int = 1,
        max_bytes: int = 256 << 20,
        renew: Callable[[], None] = lambda: None,
        copies: Copies | None = None,
    ) -> None:
        self._copies = Copies(memory.slab) if copies is None else copies
        self._allocator = memory.allocator
        self._clients = list(clients)
        self._stats = stats
        self._all = (1 << len(clients)) - 1
        self._min_hits = {"all": 0, "hits": min_hits}.get(policy)
        self._max_bytes = max_bytes
        self._renew = renew
        self._value_bytes = memory.slab.header_bytes + memory.slab.slot_bytes
        # Held while blocks are named, so that a reset comes before or after, never between. Clients call back on the
        # same thread if there is nothing to do.
        self._lock = threading.RLock()
        self._notes = SlotNotes(memory.allocator.capacity)
        self._in_flight = [0] * len(clients)

    def reserve(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Reserve slots as `Allocator.reserve` does. What is evicted for them goes to L2 first, if the policy says so.

        The slots may be written to as soon as this returns.
        """
        if not self._clients:
            return self._allocator.reserve(keys)
        with self._lock:
            refs = self._allocator.reserve(keys)
            evicted = []
            for key, ref in zip(keys, refs, strict=True):
                if ref is not None:
                    if self._min_hits is None and (before := self._notes.before(*ref)) is not None:
                        evicted.append((ref.slot, before, self._notes.stored[ref.slot] | self._notes.pending[ref.slot]))
                    self._notes.begin(ref.slot, ref.generation, key)
            if evicted:
                self._spill(evicted)
        return refs

    def publish(self, refs: Sequence[SlotRef], *, found_in: int | None = None) -> int:
        """Publish slots as `Allocator.publish` does, and write their blocks to L2 if the policy says so.

        Args:
            refs: The slots, which `reserve` gave.
            found_in: Position of the tier that the blocks came from. Those after it are taken to have them, too.

        Returns:
            How many can be found now.

        """
        if not self._clients:
            return self._allocator.publish(refs)
        with self._lock:
            published = self._allocator.publish(refs)
            whole = []
            for ref in refs:
                key = self._notes.complete(*ref)
                if key is not None:
                    if found_in is not None:
                        self._notes.stored[ref.slot] |= self._all & -(1 << found_in)
                    whole.append(key)
            if self._min_hits == 0:
                self._write(whole)
        return published

    def used(self, keys: Sequence[bytes], refs: Sequence[SlotRef]) -> None:
        """Note that blocks were used, while they are pinned."""
        if not self._clients or self._min_hits is None:
            return
        with self._lock:
            wanted = []
            for key, ref in zip(keys, refs, strict=False):
                if self._notes.holds(*ref) and self._notes.hit(ref.slot) >= self._min_hits:
                    wanted.append(key)
            self._write(wanted)

    def clear(self) -> bool:
        """Empty L1, and leave behind what is in L2. Returns whether all slots are free now."""
        with self._lock:
            self._notes.clear()
            free = self._allocator.clear()
            self._renew()
        return free

    # -- With the lock held --------------------------------------------------------------------------------------

    def _write(self, keys: Sequence[bytes]) -> None:
        """Write blocks to the tiers that don't have them."""
        for number, client in enumerate(self._clients):
            pairs: list[tuple[bytes, SlotRef]] = []
            for key in keys:
                pairs += [(key, ref) for ref in self._allocator.pin_prefix([key], used=False)]
            lacking = [pair for pair in pairs if self._lacks(pair[1], number)]
            chosen = lacking[: self._room(number, client, len(lacking))]
            left = set(pairs) - set(chosen)
            self._allocator.unpin([ref for _, ref in left])
            for batch in batches(chosen, self._value_bytes, client.tier.max_calls):
                self._put(number, client, batch)

    def _lacks(self, ref: SlotRef, number: int) -> bool:
        taken = self._notes.stored[ref.slot] | self._notes.pending[ref.slot]
        return self._notes.holds(*ref) and not taken & (1 << number)

    def _room(self, number: int, client: L2Client, wanted: int) -> int:
        """Return how many of so many blocks may be written to a tier now. The rest is counted."""
        if not wanted:
            return 0
        room = 0
        if client.health.works():
            room = max(0, self._max_bytes - self._in_flight[number]) // self._value_bytes
        if room < wanted:
            self._stats.add(f"l2_writes_dropped:{client.name}", wanted - room)
        return min(room, wanted)

    def _put(self, number: int, client: L2Client, batch: Sequence[tuple[bytes, SlotRef]]) -> None:
        keys, refs = zip(*batch, strict=True)
        for ref in refs:
            self._notes.pending[ref.slot] |= 1 << number
        self._in_flight[number] += len(refs) * self._value_bytes

        def released(kept: list[bool] | None) -> None:
            with self._lock:
                self._in_flight[number] -= len(refs) * self._value_bytes
                for ref, there in zip(refs, kept or [False] * len(refs), strict=True):
                    if self._notes.holds(*ref):
                        self._notes.pending[ref.slot] &= ~(1 << number)
                        self._notes.stored[ref.slot] |= there << number
                self._allocator.unpin(refs)

        try:
            client.put(keys, [ref.slot for ref in refs], released=released)
        except BaseException:
            released(None)
            raise

    def _spill(self, evicted: Iterable[tuple[int, bytes, int]]) -> None:
        """Copy blocks that were just evicted, and write the copies: their slots have new owners."""
        copies: dict[int, _Scratch] = {}
        blocks = list(evicted)
        for number, client in enumerate(self._clients):
            lacking = [block for block in blocks if not block[2] & (1 << number)]
            chosen = lacking[: self._room(number, client, len(lacking))]
            scratches = []
            for slot, key, _ in chosen:
                if slot not in copies:
                    copies[slot] = _Scratch(key, self._copies.take(slot))
                copies[slot].readers += 1
                scratches.append(copies[slot])
            for batch in batches(scratches, self._value_bytes, client.tier.max_calls):
                self._put_copies(number, client, batch)

    def _put_copies(self, number: int, client: L2Client, batch: Sequence[_Scratch]) -> None:
        self._in_flight[number] += len(batch) * self._value_bytes

        def released(_: list[bool] | None) -> None:
            with self._lock:
                self._in_flight[number] -= len(batch) * self._value_bytes
                for scratch in batch:
                    scratch.readers -= 1
                    if not scratch.readers:
                        self._copies.give_back(scratch.memory)

        try:
            client.put_values([one.key for one in batch], [one.memory for one in batch], released=released)
        except BaseException:
            released(None)
            raise


def batches(items: Sequence[T], item_bytes: int, max_calls: int) -> list[Sequence[T]]:
    """Split items into the batches of calls: as many calls as a tier can take at once, but not too small or large."""
    each = -(-len(items) // max(1, max_calls))
    each = max(1, min(max(each, (1 << 20) // item_bytes), _CALL_BYTES // item_bytes))
    return [items[start : start + each] for start in range(0, len(items), each)]
