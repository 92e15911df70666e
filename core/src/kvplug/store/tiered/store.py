"""The store of one worker: host memory, and behind it the tiers that outlast it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvplug.log import get_logger
from kvplug.store.tiered.gauges import L2Gauges
from kvplug.store.tiered.loader import Loader
from kvplug.store.tiered.writer import MAX_TIERS, WritePolicy, Writer

if TYPE_CHECKING:
    from kvplug.stats import Stats
    from kvplug.store.allocator import SlotRef
    from kvplug.store.l2.client import L2Client
    from kvplug.store.memory import MemoryTier

__all__ = ["TieredStore"]

logger = get_logger(__name__)

#: Writes, and prefetches, keep slots of L1 from being evicted: together at most half of it.
_SHARE = 4


class TieredStore:
    """Blocks by key, in host memory (L1) and in tiers beyond it (L2), for a worker that decides by itself.

    Without L2 tiers each call is one of L1's.

    `pin`, `used` and `announce` are called from one thread, the worker's; `reserve`, `publish` and `abandon` from any.

    Args:
        memory: L1. The store closes it.
        clients: L2, the tier to ask first first. The store closes them.
        stats: Counts what happens.
        write_policy: Which blocks go to L2.
        min_hits: For the policy `hits`: uses after which a block goes.
        write_bytes: Bytes that may be on their way to each tier.
        prefetch_bytes: Bytes that may be on their way from L2 for requests that wait.
        load_timeout: Seconds that a request's blocks are waited for.
        renew: Gives blocks other names in L2 (`StorageKeys.renew`).

    """

    def __init__(
        self,
        memory: MemoryTier,
        clients: Sequence[L2Client],
        stats: Stats,
        *,
        write_policy: WritePolicy = "all",
        min_hits: int = 1,
        write_bytes: int = 256 << 20,
        prefetch_bytes: int = 256 << 20,
        load_timeout: float = 0.5,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        if len(clients) > MAX_TIERS:
            msg = f"a store has at most {MAX_TIERS} L2 tiers, not {len(clients)}"
            raise ValueError(msg)
        self.memory = memory
        self.clients = list(clients)
        self._stats = stats
        self._load_timeout = load_timeout
        share = memory.capacity_bytes // _SHARE
        self._writer = Writer(
            memory,
            clients,
            stats,
            policy=write_policy,
            min_hits=min_hits,
            # Evicted blocks are written from copies.
            max_bytes=write_bytes if write_policy == "evicted" else min(write_bytes, share),
            renew=renew,
        )
        self._loader = Loader(memory, clients, self._writer, stats, prefetch_bytes=min(prefetch_bytes, share))
        self._gauges = L2Gauges(self.clients)

    # -- Reading -------------------------------------------------------------------------------------------------

    def deadline(self) -> float:
        """Return how long a step that begins now waits for L2, by `time.monotonic`: all its requests together."""
        return time.monotonic() + self._load_timeout

    def pin(self, keys: Sequence[bytes], until: float) -> list[SlotRef]:
        """Pin the longest run of leading blocks that can be had: those in L1, and then those that L2 gives in time.

        Args:
            keys: Block keys, in order.
            until: When to stop waiting for L2 (`deadline`).

        Returns:
            The slots, in order. Give them back with `unpin`.

        """
        refs = self.memory.allocator.pin_prefix(keys)
        if self.clients and len(refs) < len(keys) and time.monotonic() < until:
            try:
                start = time.perf_counter()
                self._loader.fetch(keys[len(refs) :], until)
                self._stats.observe("l2_wait_seconds", time.perf_counter() - start)
            except BaseException:
                self.memory.allocator.unpin(refs)
                raise
            refs += self.memory.allocator.pin_prefix(keys[len(refs) :])
        self._writer.used(keys, refs)
        return refs

    def unpin(self, refs: Sequence[SlotRef]) -> None:
        """Give back what `pin` returned, once each."""
        self.memory.allocator.unpin(refs)

    def announce(self, keys: Sequence[bytes]) -> None:
        """Prepare for a request that waits: what L1 has is kept, what L2 has is brought, as far as there is room.

        Args:
            keys: Its block keys, in order.

        """
        here = self.memory.allocator.touch_prefix(keys)
        if self.clients:
            self._loader.prefetch(keys[here:])

    # -- Writing -------------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Return slots to write blocks to, as `Allocator.reserve` does."""
        return self._writer.reserve(keys)

    def publish(self, refs: Sequence[SlotRef]) -> int:
        """Let blocks be found that have been written, and return how many can be found now."""
        return self._writer.publish(refs)

    def abandon(self, refs: Sequence[SlotRef]) -> None:
        """Give back slots that were reserved and not written."""
        self.memory.allocator.abandon(refs)

    # -- The rest ------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Forget all blocks, those in L2 too, and return whether all slots are free now.

        What is in L2 stays there, under names that this store doesn't use any more: others may need it.
        """
        self._loader.forget()
        return self._writer.clear()

    def gauges(self) -> dict[str, float]:
        """Return what can be said of the L2 tiers now, by metric and tier."""
        return self._gauges()

    def close(self) -> None:
        """Write what is on its way, stop, and give the memory back. Copies must have ended before."""
        for client in self.clients:
            client.close()
        self.memory.close()
