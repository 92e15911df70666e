"""Worker half of type1: copies blocks between the paged cache and the host, in the step and on its thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvplug import compat
from kvplug.log import RateLimited, get_logger
from kvplug.paged import PagedCache, Transfer
from kvplug.paged.groups import PagedGroups
from kvplug.stats import Stats
from kvplug.store import MemoryTier, SlotRef
from kvplug.store.settings import StoreSettings
from kvplug.store.tiered import TieredStore, make_store
from kvplug_type1.metadata import Announcement, LoadRequest, SaveRequest, Type1Metadata, Type1WorkerMetadata
from kvplug_type1.order import BlockOrder

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup

__all__ = ["Type1Worker"]

logger = get_logger(__name__)
_limited = RateLimited(logger)


class Type1Worker:
    """Loads and saves one worker's shard of the KV cache."""

    def __init__(
        self, settings: StoreSettings, *, groups: Sequence[KVGroup], num_blocks: int, shard: str, drop_last_hit: bool
    ) -> None:
        """Prepare a worker; memory is taken, and L2 opened, when its paged cache is known.

        Args:
            settings: Of the block store.
            groups: The model's KV-cache groups.
            num_blocks: Blocks in the paged cache.
            shard: What part of every block this rank holds (`kvplug.namespace.shard_id`).
            drop_last_hit: Whether the last blocks of a hit aren't used, since draft layers' KV at their end depends on
                a token that their keys don't cover.

        """
        self._settings = settings
        self._groups = tuple(groups)
        self._num_blocks = num_blocks
        self._shard = shard
        self._order = BlockOrder(groups)
        self._dropped = self._order.alignment if drop_last_hit else 0
        self._paged: PagedGroups | None = None
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
        """The worker's paged cache: that of the first KV-cache group, of which there is one as a rule."""
        return self._caches[0]

    @property
    def _caches(self) -> tuple[PagedCache, ...]:
        assert self._paged is not None
        return self._paged.caches

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the paged cache, and the block store that goes with it.

        Args:
            kv_caches: Tensor of each layer, by name.

        Raises:
            UnsupportedError: A layer's layout isn't understood, or there is a paged cache already.
            ConfigError: The memory doesn't hold a single block, or something that L2 needs isn't installed.
            KvplugError: The memory can't be had, or L2 can't be reached and is required.

        """
        if self._store is not None:
            raise compat.two_engines("Type1Connector")
        paged = self._paged = PagedGroups.from_kv_caches(kv_caches, self._groups, num_blocks=self._num_blocks)
        tensors = kv_caches.values()
        sizes = ", ".join(str(group.block_size) for group in self._groups)
        self._store = make_store(
            self._settings,
            self.stats,
            block_bytes=paged.slot_bytes,
            item_bytes=max(tensor.element_size() for tensor in tensors),
            shard=self._shard,
            layout=f"{sizes} tokens; {paged.layout}",
            pin=any(tensor.is_cuda for tensor in tensors),
        )
        logger.info(
            "kvplug: L1 holds %d blocks of %d bytes (%.2f GiB) in this rank",
            self.tier.allocator.capacity,
            paged.slot_bytes,
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
        nbytes = 0
        store = self.store
        pinned: list[SlotRef] = []
        transfers: list[Transfer] = []
        try:
            pinned = store.pin(load.keys, until)
            self.stats.add("blocks_hit", len(pinned))
            num_blocks, tokens = self._usable(load, len(pinned))
            if tokens <= 0:
                return 0
            for group, refs, block_ids in _by_group(load, pinned[:num_blocks]):
                slots = [ref.slot for ref in refs]
                transfers.append(self._caches[group].scatter(self.tier.slab, slots, block_ids))
                nbytes += len(slots) * self._caches[group].block_bytes
        except Exception as error:  # noqa: BLE001 - a failed load is a miss, whatever it was
            self._failed("load", error)
            return 0
        finally:
            self._unpin_after(transfers, pinned)
        self.stats.add("blocks_loaded", num_blocks)
        self.stats.add("tokens_loaded", tokens)
        self.stats.add("loaded_bytes", nbytes)
        return tokens

    def _usable(self, load: LoadRequest, found: int) -> tuple[int, int]:
        """Return how many blocks are of use, of those that were found, and how many tokens further they lead."""
        computed = load.num_computed_tokens
        num_blocks, tokens = self._order.usable(
            computed, load.groups, wanted=len(load.keys), found=found, dropped=self._dropped
        )
        return num_blocks, tokens - computed

    def _unpin_after(self, transfers: Sequence[Transfer], refs: Sequence[SlotRef]) -> None:
        """Unpin slots when copies out of them have ended."""
        unpin = partial(self.store.unpin, refs)
        if not transfers:
            unpin()
        for number, transfer in enumerate(transfers, 1):
            # They are looked at in this order.
            self._pending.append((transfer, unpin if number == len(transfers) else _nothing, None))

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
            transfer = self._caches[save.group].gather(block_ids, self.tier.slab, [ref.slot for ref in refs])
        except Exception as error:  # noqa: BLE001 - a failed save is a later miss, whatever it was
            self.store.abandon(refs)
            self._failed("save", error)
            return
        finally:
            self.stats.add("blocks_evicted", allocator.evictions - evicted)
            self.stats.add("saves_refused", allocator.refused - refused)
        self._pending.append((transfer, partial(self._publish, refs, save.group), partial(self.store.abandon, refs)))

    def _publish(self, refs: Sequence[SlotRef], group: int) -> None:
        num_blocks = self.store.publish(refs)
        self.stats.add("blocks_saved", num_blocks)
        if group == 0:  # a token has KV in every group
            self.stats.add("tokens_saved", num_blocks * self._groups[0].block_size)
        self.stats.add("saved_bytes", num_blocks * self._caches[group].block_bytes)

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


def _by_group(load: LoadRequest, refs: Sequence[SlotRef]) -> Iterator[tuple[int, list[SlotRef], list[int]]]:
    """Yield what is to be loaded of each KV-cache group: the slots of the first blocks, and where they go."""
    parts: dict[int, tuple[list[SlotRef], list[int]]] = {}
    for group, ref, block in zip(load.groups or repeat(0), refs, load.block_ids, strict=False):
        slots, block_ids = parts.setdefault(group, ([], []))
        slots.append(ref)
        block_ids.append(block)
    for group, (slots, block_ids) in parts.items():
        yield group, slots, block_ids


def _nothing() -> None:
    """Do nothing."""
