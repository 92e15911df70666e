"""Worker half of type1: copies blocks between the paged cache and the host, in the step and on its thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from kvplug import compat
from kvplug.log import RateLimited, get_logger
from kvplug.paged import PagedCache, Transfer
from kvplug.stats import Stats
from kvplug.store import MemoryTier, SlotRef
from kvplug.store.settings import StoreSettings
from kvplug.store.tiered import TieredStore, make_store
from kvplug_type1.metadata import Announcement, LoadRequest, SaveRequest, Type1Metadata, Type1WorkerMetadata

__all__ = ["Type1Worker"]

logger = get_logger(__name__)
_limited = RateLimited(logger)


class Type1Worker:
    """Loads and saves one worker's shard of the KV cache."""

    def __init__(self, settings: StoreSettings, *, block_size: int, shard: str, drop_last_hit: bool) -> None:
        """Prepare a worker; memory is taken, and L2 opened, when its paged cache is known.

        Args:
            settings: Of the block store.
            block_size: Tokens per block.
            shard: What part of every block this rank holds (`kvplug.namespace.shard_id`).
            drop_last_hit: Whether the last block of a hit isn't used, since draft layers' KV at its end depends on
                a token that its key doesn't cover.

        """
        self._settings = settings
        self._block_size = block_size
        self._shard = shard
        self._drop_last_hit = drop_last_hit
        self._paged: PagedCache | None = None
        self._store: TieredStore | None = None
        self._reset_count = 0
        # Copies under way, oldest first: what to do when one has ended, and instead if it failed.
        self._pending: deque[tuple[Transfer, Callable[[], None], Callable[[], None] | None]] = deque()
        #: Metadata of the last step for which the hook was called.
        self._hooked: Type1Metadata | None = None
        #: What the hook answered in this step.
        self._loaded: dict[str, int] = {}
        self._reported: dict[str, float] = {}
        self.stats = Stats()

    @property
    def store(self) -> TieredStore:
        """The worker's block store."""
        assert self._store is not None
        return self._store

    @property
    def tier(self) -> MemoryTier:
        """The part of it that is in host memory."""
        return self.store.memory

    @property
    def paged(self) -> PagedCache:
        """The worker's paged cache."""
        assert self._paged is not None
        return self._paged

    def register_kv_caches(
        self, kv_caches: Mapping[str, Any], *, num_blocks: int, page_size_bytes: Mapping[str, int]
    ) -> None:
        """Take the paged cache, and the block store that goes with it.

        Args:
            kv_caches: Tensor of each layer, by name.
            num_blocks: Blocks in the paged cache.
            page_size_bytes: Bytes of one block of each layer.

        Raises:
            UnsupportedError: A layer's layout isn't understood, or there is a paged cache already.
            ConfigError: The memory doesn't hold a single block, or something that L2 needs isn't installed.
            KvplugError: The memory can't be had, or L2 can't be reached and is required.

        """
        if self._store is not None:
            raise compat.two_engines("Type1Connector")
        self._paged = PagedCache.from_kv_caches(kv_caches, num_blocks=num_blocks, page_size_bytes=page_size_bytes)
        tensors = kv_caches.values()
        self._store = make_store(
            self._settings,
            self.stats,
            block_bytes=self._paged.block_bytes,
            item_bytes=max(tensor.element_size() for tensor in tensors),
            shard=self._shard,
            layout=f"{self._block_size} tokens; {self._paged.layout}",
            pin=any(tensor.is_cuda for tensor in tensors),
        )
        logger.info(
            "kvplug: L1 holds %d blocks of %d bytes (%.2f GiB) in this rank",
            self.tier.allocator.capacity,
            self._paged.block_bytes,
            self.tier.capacity_bytes / 2**30,
        )

    def load(self, metadata: Type1Metadata) -> dict[str, int]:
        """Copy what is stored into the paged cache; what only L2 has is waited for, within bounds.

        Args:
            metadata: This step's metadata.

        Returns:
            By request id, the tokens that follow its computed tokens and are in the paged cache now.

        """
        self._hooked = metadata
        self._settle()
        if metadata.reset_count != self._reset_count:
            self.store.clear()
            self._reset_count = metadata.reset_count
        # What waits is used before what is loaded now, which is then the last to be evicted.
        for waiting in metadata.announced:
            self._announce(waiting)
        self._loaded = {}
        if metadata.loads:
            start = perf_counter()
            # All requests of the step together wait no longer than one: each of them waits for the whole step.
            until = self.store.deadline()
            self._loaded = {load.request_id: self._load_one(load, until) for load in metadata.loads}
            self._settle()
            self.stats.observe("load_seconds", perf_counter() - start)
        return self._loaded

    def report(self, skipped: Mapping[str, int]) -> Type1WorkerMetadata | None:
        """Say what came of this step's loads, once.

        Args:
            skipped: Tokens that didn't have to be computed, by request id, as ranks and hooks have agreed.

        """
        loaded, self._loaded = self._loaded, {}
        ours = {name: min(count, skipped[name]) for name, count in loaded.items() if count > 0 and name in skipped}
        return Type1WorkerMetadata(ours) if ours else None

    def gauges(self) -> dict[str, float]:
        """Return how much of the host memory is used, and how much there is, in bytes, if that has changed."""
        if self._store is None:
            return {}
        gauges = {
            "l1_usage_bytes": self.tier.used_bytes,
            "l1_capacity_bytes": self.tier.capacity_bytes,
            **self._store.gauges(),
        }
        if gauges == self._reported:
            return {}
        self._reported = gauges
        return gauges

    def _announce(self, waiting: Announcement) -> None:
        try:
            self.store.announce(waiting.keys)
        except Exception as error:  # noqa: BLE001 - it is only a preparation
            self._failed("load", error)

    def _load_one(self, load: LoadRequest, until: float) -> int:
        self.stats.add("blocks_looked_up", len(load.keys))
        store = self.store
        pinned: list[SlotRef] = []
        try:
            pinned = store.pin(load.keys, until)
            self.stats.add("blocks_hit", len(pinned))
            num_blocks = len(pinned) - (1 if self._drop_last_hit and pinned else 0)
            tokens = self._tokens(load, num_blocks)
            if tokens > 0:
                slots = [ref.slot for ref in pinned[:num_blocks]]
                transfer = self.paged.scatter(self.tier.slab, slots, load.block_ids[:num_blocks])
                self._pending.append((transfer, partial(store.unpin, pinned), None))
                pinned = []
        except Exception as error:  # noqa: BLE001 - a failed load is a miss, whatever it was
            self._failed("load", error)
            return 0
        finally:
            store.unpin(pinned)
        if tokens <= 0:
            return 0
        self.stats.add("blocks_loaded", num_blocks)
        self.stats.add("tokens_loaded", tokens)
        self.stats.add("loaded_bytes", num_blocks * self.paged.block_bytes)
        return tokens

    def _tokens(self, load: LoadRequest, num_blocks: int) -> int:
        if num_blocks == 0:
            return 0
        return load.first_token + num_blocks * self._block_size - load.num_computed_tokens

    def save(self, metadata: Type1Metadata) -> None:
        """Copy blocks that this step completed to the host.

        On a GPU this returns before they are copied; later compute on the current stream waits for that.
        """
        if metadata.loads and self._hooked is not metadata:
            _limited.warning("hook", "A step had loads but the hook wasn't called: run kvplug doctor.")
            self.stats.add("hook_missed")
        if metadata.saves:
            start = perf_counter()
            for save in metadata.saves:
                self._save_one(save)
            self.stats.observe("save_seconds", perf_counter() - start)
        self._settle()

    def _save_one(self, save: SaveRequest) -> None:
        allocator = self.tier.allocator
        evicted, refused = allocator.evictions, allocator.refused
        refs: tuple[SlotRef, ...] = ()
        try:
            reserved = self.store.reserve(save.keys)
            pairs = [(block, ref) for block, ref in zip(save.block_ids, reserved, strict=True) if ref is not None]
            if not pairs:
                return
            block_ids, refs = zip(*pairs, strict=True)
            transfer = self.paged.gather(block_ids, self.tier.slab, [ref.slot for ref in refs])
        except Exception as error:  # noqa: BLE001 - a failed save is a later miss, whatever it was
            self.store.abandon(refs)
            self._failed("save", error)
            return
        finally:
            self.stats.add("blocks_evicted", allocator.evictions - evicted)
            self.stats.add("saves_refused", allocator.refused - refused)
        self._pending.append((transfer, partial(self._publish, refs), partial(self.store.abandon, refs)))

    def _publish(self, refs: Sequence[SlotRef]) -> None:
        num_blocks = self.store.publish(refs)
        self.stats.add("blocks_saved", num_blocks)
        self.stats.add("tokens_saved", num_blocks * self._block_size)
        self.stats.add("saved_bytes", num_blocks * self.paged.block_bytes)

    def _settle(self, *, wait: bool = False) -> None:
        """Unpin and publish what has been copied. Copies on a GPU end while the host goes on; others have ended."""
        while self._pending:
            transfer, finish, give_up = self._pending[0]
            try:
                if wait:
                    transfer.wait()
                elif not transfer.done():
                    return
            except Exception as error:  # noqa: BLE001 - the device may report anything
                self._failed("save" if give_up else "load", error)
                finish = give_up or finish
            self._pending.popleft()
            try:
                finish()
            except Exception as error:  # noqa: BLE001 - an eviction policy may be anybody's
                self._failed("save" if give_up else "load", error)

    def _failed(self, what: str, error: Exception) -> None:
        self.stats.add(f"{what}_errors")
        _limited.warning(
            (what, type(error)),
            "A %s failed, its tokens are %s: %s: %s",
            what,
            "computed" if what == "load" else "not stored",
            type(error).__name__,
            error,
        )

    def close(self) -> None:
        """Write to L2 what is on its way there, and give the host memory back. May be called again."""
        if self._store is not None:
            self._settle(wait=True)
            self._store.close()
            self._store = None
