"""Making a worker's store of its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplug.errors import ConfigError, KvplugError
from kvplug.log import get_logger
from kvplug.store.l2.blocks import Blocks
from kvplug.store.l2.client import L2Client
from kvplug.store.l2.codecs import make_codec
from kvplug.store.l2.keys import StorageKeys
from kvplug.store.l2.tier import Tier, TierError
from kvplug.store.l2.value import HEADER_BYTES, layout_digest
from kvplug.store.memory import MemoryTier
from kvplug.store.tiered.store import TieredStore

if TYPE_CHECKING:
    from kvplug.stats import Stats
    from kvplug.store.settings import StoreSettings

__all__ = ["make_store"]

logger = get_logger(__name__)

#: Seconds that a tier has to open at start.
_START_SECONDS = 5.0


def make_store(
    settings: StoreSettings,
    stats: Stats,
    *,
    block_bytes: int,
    item_bytes: int,
    shard: str,
    layout: str,
    pin: bool,
) -> TieredStore:
    """Take the memory, and open the tiers.

    Args:
        settings: The settings.
        stats: Counts what happens.
        block_bytes: Bytes of a block over all layers.
        item_bytes: Bytes of an element of the KV cache.
        shard: What part of every block this rank holds (`kvplug.namespace.shard_id`).
        layout: How a block's bytes are laid out (`PagedCache.layout`).
        pin: Whether to pin the memory, for copies to and from a GPU.

    Raises:
        ConfigError: The memory doesn't hold a block, or a tier or codec lacks what it needs.
        KvplugError: The memory can't be had, or a tier that is required can't be opened.

    """
    codec = make_codec(settings.l2_codec, item_bytes)
    tiers = [_make(tier, settings) for tier in settings.tiers]
    memory = MemoryTier.with_capacity(
        settings.l1_size_per_rank,
        block_bytes,
        header_bytes=HEADER_BYTES if tiers else 0,
        policy=settings.l1_eviction_policy,
        pin=pin,
        background=pin,
    )
    keys = StorageKeys(shard, layout, namespace=settings.l2_namespace)
    clients = []
    for tier in tiers:
        blocks = Blocks(memory.slab, keys, layout_digest(shard, layout), codec)
        clients.append(
            L2Client(tier, blocks, stats, timeout=settings.l2_timeout, lookup_timeout=settings.l2_load_timeout)
        )
    store = TieredStore(
        memory,
        clients,
        stats,
        write_policy=settings.l2_write_policy,
        min_hits=settings.l2_write_min_hits,
        write_bytes=settings.l2_write_inflight_per_rank,
        prefetch_bytes=settings.l2_prefetch_inflight_per_rank,
        load_timeout=settings.l2_load_timeout,
        renew=keys.renew,
    )
    try:
        for client in clients:
            _start(client, required=settings.l2_required)
    except BaseException:
        store.close()
        raise
    return store


def _make(tier: type[Tier], settings: StoreSettings) -> Tier:
    try:
        return tier(settings if tier.Settings is not None else None)  # type: ignore[call-arg]
    except TierError as error:
        raise ConfigError(f"L2 tier {tier.name} can't be used: {error}") from error


def _start(client: L2Client, *, required: bool) -> None:
    try:
        client.start(_START_SECONDS)
    except TierError as error:
        if required:
            raise KvplugError(
                f"L2 tier {client.name} can't be used ({error}): see to it that it works, or set l2_required to false "
                "to start without it."
            ) from error
        logger.warning(
            "kvplug: L2 tier %s can't be used yet (%s); the engine starts without it, and uses it as soon as it works.",
            client.name,
            error,
        )
    else:
        logger.info("kvplug: L2 tier %s (%s) is open", client.name, client.tier.place)
