"""Which blocks of L1 go to L2, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
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
        # Blocks that are written before they are published: how many tiers haven't ended, and pins from then on.
        self._early: dict[SlotRef, int] = {}
        self._held: dict[SlotRef, Sequence[SlotRef]] = {}
        # Those of them that are given back when the tiers have ended: another rank may have nothing to do with why.
        self._late: set[SlotRef] = set()

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
            found_in: Position of the client that the blocks came from. Its tier, and those after it, are taken to have
                them, too. Behind the tiers' own clients, in the same order, come those that read what other engines
                have stored: a tier that has a block under another engine's name needs no second copy.

        Returns:
            How many can be found now.

        """
        if not self._clients:
            return self._allocator.publish(refs)
        with self._lock:
            refs = self._without_late(refs)
            published = self._allocator.publish(refs)
            whole = []
            for ref in refs:
                key = self._notes.complete(*ref)
                if key is not None and self._early.get(ref, 0):
                    # Nothing else has happened since it was published, so it's still there to be pinned.
                    self._held[ref] = self._allocator.pin_prefix([key], used=False)
                if key is not None:
                    if found_in is not None:
                        self._notes.stored[ref.slot] |= self._all & -(1 << found_in % len(self._clients))
                    whole.append(key)
            if self._min_hits == 0:
                self._write(whole)
        return published

    def abandon(self, refs: Sequence[SlotRef]) -> None:
        """Give back slots that were reserved and aren't to be found: those that tiers read, when they have ended."""
        with self._lock:
            late = [ref for ref in refs if ref in self._early]
            self._late.update(late)
            self._allocator.abandon([ref for ref in refs if ref not in self._late])

    def _without_late(self, refs: Sequence[SlotRef]) -> Sequence[SlotRef]:
        """Hold those slots back that nobody will find, after a reset, and that tiers still read. Return the others."""
        late = {ref for ref in refs if ref in self._early and not self._notes.holds(*ref)}
        self._late |= late
        return [ref for ref in refs if ref not in late] if late else refs

    def write_after(self, save: int, refs: Sequence[SlotRef]) -> None:
        """Write blocks to the tiers as soon as they are in their slots, if the policy is to write all.

        What finds no room is left to `publish`.

        Args:
            save: What fills the slots. Clients know it.
            refs: Slots that `reserve` gave, and that aren't published yet.

        """
        if self._min_hits != 0:
            return
        with self._lock:
            for number, client in enumerate(self._clients):
                room = self._free(number, client)
                pairs = [(key, ref) for ref in refs[:room] if (key := self._notes.key(*ref)) is not None]
                for batch in batches(pairs, self._value_bytes, client.tier.max_calls):
                    self._put(number, client, batch, after=save)

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

    def assure(self, keys: Sequence[bytes]) -> None:
        """Write those blocks of L1 again that a tier doesn't have any more although it had them.

        For blocks that somebody else is about to want from there.

        Args:
            keys: Block keys. Those that aren't in L1 are left alone.

        """
        for number, client in enumerate(self._clients):
            with self._lock:
                refs = {key: ref for key in keys for ref in self._allocator.pin_prefix([key], used=False)}
                self._allocator.unpin(list(refs.values()))
                asked = [key for key, ref in refs.items() if self._notes.stored[ref.slot] & (1 << number)]
            if asked:
                released = partial(self._found, number, asked, [refs[key] for key in asked])
                client.exists(asked, urgent=False, released=released)

    def _found(self, number: int, keys: Sequence[bytes], refs: Sequence[SlotRef], found: list[bool] | None) -> None:
        if found is None:
            return
        with self._lock:
            lost = [pair for pair, there in zip(zip(keys, refs, strict=True), found, strict=True) if not there]
            for _, ref in lost:
                if self._notes.holds(*ref):
                    self._notes.stored[ref.slot] &= ~(1 << number)
            self._write([key for key, _ in lost])

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
        room = self._free(number, client)
        if room < wanted:
            self._stats.add(f"l2_writes_dropped:{client.name}", wanted - room)
        return min(room, wanted)

    def _free(self, number: int, client: L2Client) -> int:
        """Return how many more blocks may be on their way to a tier."""
        if not client.health.works():
            return 0
        return int(max(0, self._max_bytes - self._in_flight[number]) // self._value_bytes)

    def _put(
        self, number: int, client: L2Client, batch: Sequence[tuple[bytes, SlotRef]], *, after: int | None = None
    ) -> None:
        """Write blocks. They are pinned, or are reserved until `after` has filled them, and get pinned then."""
        keys, refs = zip(*batch, strict=True)
        for ref in refs:
            self._notes.pending[ref.slot] |= 1 << number
            if after is not None:
                self._early[ref] = self._early.get(ref, 0) + 1
        self._in_flight[number] += len(refs) * self._value_bytes

        def released(kept: list[bool] | None) -> None:
            with self._lock:
                self._in_flight[number] -= len(refs) * self._value_bytes
                for ref, there in zip(refs, kept or [False] * len(refs), strict=True):
                    if self._notes.holds(*ref):
                        self._notes.pending[ref.slot] &= ~(1 << number)
                        self._notes.stored[ref.slot] |= there << number
                    if after is not None:
                        self._one_less(ref)
                if after is None:
                    self._allocator.unpin(refs)

        # Only the clients of a directed store have such an argument, and only there is anything written early.
        options = {} if after is None else {"after": after}
        try:
            client.put(keys, [ref.slot for ref in refs], released=released, **options)
        except BaseException:
            released(None)
            raise

    def _one_less(self, ref: SlotRef) -> None:
        """Take in that one of the tiers has ended with a block that is written early."""
        self._early[ref] -= 1
        if not self._early[ref]:
            del self._early[ref]
            if ref in self._late:
                self._late.remove(ref)
                self._allocator.abandon([ref])
            else:
                self._allocator.unpin(self._held.pop(ref, ()))

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
