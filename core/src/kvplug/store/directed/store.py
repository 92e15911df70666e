"""The scheduler's side of a store: which block is in which slot of every worker's slab, and what goes to L2."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvplug.store.allocator import Allocator, SlotRef
from kvplug.store.directed.commands import Command
from kvplug.store.directed.director import Director
from kvplug.store.policies import make_policy
from kvplug.store.tiered.loader import Loader, Prefetch
from kvplug.store.tiered.writer import Writer

if TYPE_CHECKING:
    from kvplug.stats import Stats
    from kvplug.store.settings import StoreSettings

__all__ = ["DirectedStore"]


class _SlotNumbers:
    """Stands in for copies of evicted blocks: the workers make those, of the slots with these numbers."""

    def take(self, slot: int) -> int:
        return slot

    def give_back(self, copy: int) -> None:
        pass


class DirectedStore:
    """Blocks by key, in slots that are somewhere else.

    All methods return at once. They are called on the scheduler's thread.

    Args:
        settings: Of the block store.
        stats: Counts what happens.
        num_slots: Slots in every worker's slab.
        value_bytes: Bytes of a slot, its header included.
        num_ranks: Workers.
        num_peers: Kinds of engines with other parallel sizes whose values in L2 are read, too, where there are none of
            this engine's own. The workers must have been told of as many (`kvplug.store.tiered.peers`).

    """

    def __init__(
        self,
        settings: StoreSettings,
        stats: Stats,
        *,
        num_slots: int,
        value_bytes: int,
        num_ranks: int,
        num_peers: int = 0,
    ) -> None:
        self.allocator = Allocator(num_slots, make_policy(settings.l1_eviction_policy, num_slots))
        self._director = Director(settings.tiers, num_ranks, num_peers)
        self._max_age = settings.l2_timeout
        # A worker's memory as far as loader and writer look at it.
        memory: Any = SimpleNamespace(
            allocator=self.allocator, slab=SimpleNamespace(header_bytes=0, slot_bytes=value_bytes)
        )
        clients: Any = self._director.clients
        share = num_slots * value_bytes // settings.l2_share
        evicted = settings.l2_write_policy == "evicted"
        self._writer = Writer(
            memory,
            clients[: len(settings.tiers)],
            stats,
            policy=settings.l2_write_policy,
            min_hits=settings.l2_write_min_hits,
            max_bytes=settings.l2_write_inflight_per_rank
            if evicted
            else min(settings.l2_write_inflight_per_rank, share),
            copies=_SlotNumbers(),  # type: ignore[arg-type]
        )
        self._loader = Loader(
            memory, clients, self._writer, stats, prefetch_bytes=min(settings.l2_prefetch_inflight_per_rank, share)
        )

    # -- L1 ------------------------------------------------------------------------------------------------------

    def pin_prefix(self, keys: Sequence[bytes]) -> list[SlotRef]:
        """Pin the longest run of leading keys that is there. Give the slots back with `unpin`, once each."""
        refs = self.allocator.pin_prefix(keys)
        if refs:
            self._writer.used(keys, refs)
        return refs

    def unpin(self, refs: Sequence[SlotRef]) -> None:
        """Give back what `pin_prefix` returned."""
        self.allocator.unpin(refs)

    def reserve(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Return slots to write blocks to, as `Allocator.reserve` does."""
        return self._writer.reserve(keys)

    def publish(self, refs: Sequence[SlotRef]) -> int:
        """Let blocks be found that all ranks have written, and return how many can be found now."""
        return self._writer.publish(refs)

    def write_after(self, save: int, refs: Sequence[SlotRef]) -> None:
        """Let workers write reserved slots to L2 as soon as a save has filled them, as `Writer.write_after` does."""
        self._writer.write_after(save, refs)

    def abandon(self, refs: Sequence[SlotRef]) -> None:
        """Give back slots that were reserved and not written, as `Writer.abandon` does."""
        self._writer.abandon(refs)

    def assure(self, keys: Sequence[bytes]) -> None:
        """Let tiers have those blocks of L1 again that they have lost, as `Writer.assure` does."""
        self._writer.assure(keys)

    # -- L2 ------------------------------------------------------------------------------------------------------

    @property
    def has_l2(self) -> bool:
        """Whether there is a tier that works."""
        return any(client.health.works() for client in self._director.clients)

    def prefetch(self, keys: Sequence[bytes], *, only_last: bool = False) -> Prefetch:
        """Begin to bring blocks from L2 into L1, as `Loader.prefetch` does."""
        return self._loader.prefetch(keys, only_last=only_last)

    def go_on(self, prefetch: Prefetch) -> Prefetch | None:
        """Begin to bring what a prefetch that is over has left out, as `Loader.go_on` does."""
        return self._loader.go_on(prefetch)

    def is_coming(self, key: bytes) -> bool:
        """Say whether a block will be in L1 soon: it is being saved, or on its way from an L2 tier that isn't late."""
        if self._loader.is_coming(key):
            return self._loader.coming(key, self._max_age)
        return self.allocator.is_reserved(key)

    def clear(self) -> bool:
        """Forget all blocks, those in L2 too, and return whether all slots are free now."""
        self._director.epoch += 1
        self._loader.forget()
        return self._writer.clear()

    # -- Workers -------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Resets so far. Workers leave what is in L2 behind when it rises."""
        return self._director.epoch

    @property
    def has_commands(self) -> bool:
        """Whether there is something that the next step has to tell the workers."""
        return self._director.has_unsent

    @property
    def num_pending(self) -> int:
        """Commands that the workers haven't answered."""
        return self._director.num_pending

    def take_commands(self) -> tuple[Command, ...]:
        """Return what the next step has to tell the workers, once."""
        return self._director.take()

    def answer(self, answers: Mapping[int, tuple[int, Sequence[bool]]], down: Collection[str] | None = None) -> None:
        """Take in what the workers report.

        Args:
            answers: See `Director.answer`.
            down: Names of the tiers that fail, if that has changed.

        """
        if down is not None:
            self._director.down = frozenset(down)
        self._director.answer(answers)
