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
    from collections.abc import Sequence

    from kvplug.stats import Stats
    from kvplug.store.settings import StoreSettings
    from kvplug.store.slab import Slab

__all__ = ["make_clients", "make_store", "start_clients"]

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
    memory = MemoryTier.with_capacity(
        settings.l1_size_per_rank,
        block_bytes,
        header_bytes=HEADER_BYTES if settings.tiers else 0,
        policy=settings.l1_eviction_policy,
        pin=pin,
        background=pin,
    )
    clients, keys = make_clients(settings, stats, memory.slab, item_bytes=item_bytes, shard=shard, layout=layout)
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
        start_clients(clients, required=settings.l2_required)
    except BaseException:
        store.close()
        raise
    return store


def make_clients(
    settings: StoreSettings, stats: Stats, slab: Slab, *, item_bytes: int, shard: str, layout: str
) -> tuple[list[L2Client], StorageKeys]:
    """Make a client for each tier that the settings name, and what names blocks in them. Nothing is opened yet.

    Args:
        settings: The settings.
        stats: Counts what happens.
        slab: The worker's memory, whose slots have room for headers.
        item_bytes: As `make_store`.
        shard: As `make_store`.
        layout: As `make_store`.

    Raises:
        ConfigError: A tier or codec lacks what it needs.

    """
    codec = make_codec(settings.l2_codec, item_bytes)
    keys = StorageKeys(shard, layout, namespace=settings.l2_namespace)
    blocks = Blocks(slab, keys, layout_digest(shard, layout), codec)
    return [
        L2Client(
            _make(tier, settings), blocks, stats, timeout=settings.l2_timeout, lookup_timeout=settings.l2_load_timeout
        )
        for tier in settings.tiers
    ], keys


def start_clients(clients: Sequence[L2Client], *, required: bool) -> None:
    """Open the tiers.

    Args:
        clients: The tiers.
        required: Whether one that can't be opened now is an error. If not, it is opened when it can be.

    Raises:
        KvplugError: A tier that is required can't be opened.

    """
    for client in clients:
        _start(client, required=required)


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
