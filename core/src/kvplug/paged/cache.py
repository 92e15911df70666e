"""The paged KV cache of one KV-cache group, as blocks that can be copied out and in."""

from __future__ import annotations

import hashlib
from copy import copy
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch

from kvplug.errors import UnsupportedError
from kvplug.paged.host import HostCopier
from kvplug.paged.layout import Layer, Region, fuse, read_layer
from kvplug.paged.staged import CudaStream, StagedCopier
from kvplug.paged.streaming import streaming_copy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvplug.paged.transfer import Transfer
    from kvplug.store.slab import Slab

__all__ = ["Copier", "PagedCache"]


class Copier(Protocol):
    """Copies blocks between regions of a paged cache and the slots of a slab. Arguments were checked before."""

    def of(self, regions: Sequence[Region]) -> Copier:
        """Return a copier of fewer regions, which lie in slots as they do here."""

    def gather(self, block_ids: list[int], slab: Slab, slots: list[int], *, hold: bool = True) -> Transfer:
        """Copy each block to the slot at the same position."""

    def scatter(self, slab: Slab, slots: list[int], block_ids: list[int], *, hold: bool = True) -> Transfer:
        """Copy each slot to the block at the same position."""


class PagedCache:
    """The blocks of one KV-cache group, over all its layers.

    In a slot, a block is the layers' parts one after the other, in the order of `layers`, each in the order in which
    its bytes are in memory. So the content of a slot fits every cache whose `layout` is equal, wherever its blocks are
    and however they are padded.

    On a GPU, copies run on a stream of their own and are ordered against the compute of the *current* stream: call
    from the thread that runs the model. The GPU path has not yet been run on a GPU.

    Use `PagedCache.from_kv_caches`.

    Attributes:
        num_blocks: Number of blocks in vLLM's block tables, the null block (id 0) included.
        block_bytes: Bytes of one block over all layers: the size of a slot.
        layers: The layers that are stored. A layer that shares another one's KV cache isn't listed again.
        layout: Describes the bytes of a slot, as text: number of layers, a digest of their names, dtype, shape and
            memory order. It is the same in every process.

    """

    def __init__(self, layers: Sequence[Layer], regions: Sequence[Region], copier: Copier) -> None:
        self.layers = tuple(layers)
        self._regions = tuple(regions)
        self.num_blocks = regions[0].num_blocks
        self.block_bytes = sum(region.nbytes for region in regions)
        self.layout = describe(self.layers)
        self._copier = copier

    @property
    def device(self) -> torch.device:
        """Where the paged cache is."""
        return self._regions[0].storage.device

    @classmethod
    def from_kv_caches(
        cls,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        num_blocks: int,
        page_size_bytes: Mapping[str, int] | None = None,
    ) -> PagedCache:
        """Find the blocks in what vLLM gives to `register_kv_caches`.

        Args:
            kv_caches: The layers of one KV-cache group, by name. Their order becomes the order in a slot.
            num_blocks: Number of blocks in the group's block tables (`KVCacheConfig.num_blocks`).
            page_size_bytes: Bytes of one block of a layer, by name, as its KV-cache spec says (`page_size_bytes`),
                paddings included. Used to check what was found; layers may be missing.

        Raises:
            UnsupportedError: A layer's blocks can't be found for sure, or its memory is where kvplug can't copy.
            ValueError: There are no layers, or no blocks.

        """
        if not kv_caches or num_blocks < 1:
            msg = f"a paged cache has layers and blocks, got {len(kv_caches)} layers and {num_blocks} blocks"
            raise ValueError(msg)
        pages = page_size_bytes or {}
        found = [read_layer(name, tensor, num_blocks, pages.get(name)) for name, tensor in kv_caches.items()]
        distinct: dict[object, tuple[Layer, Region]] = {}
        for layer, region in found:
            # Layers that share a KV cache (cross-layer sharing) have the same tensor.
            distinct.setdefault((region.storage.data_ptr(), region.offset, layer.layout), (layer, region))
        layers, regions = zip(*distinct.values(), strict=True)
        fused = fuse(regions)
        return cls(layers, regions, _copier(fused, {tensor.device for tensor in kv_caches.values()}))

    def of_layers(self, names: Collection[str]) -> PagedCache:
        """Return the part of this cache that some layers are, for copies layer by layer.

        A slot holds the whole block as before, and a copy touches only these layers' bytes in it.

        Args:
            names: Names of layers, neighbours in `layers`.

        Raises:
            ValueError: None of them is stored here.

        """
        regions = []
        offset = 0
        chosen = []
        for layer, region in zip(self.layers, self._regions, strict=True):
            if layer.name in names:
                chosen.append(layer)
                regions.append(replace(region, slot_offset=offset))
            offset += layer.nbytes
        if not regions:
            msg = f"none of {', '.join(names)} is stored here"
            raise ValueError(msg)
        part = copy(self)
        part.layers = tuple(chosen)
        part._regions = tuple(regions)  # noqa: SLF001
        part._copier = self._copier.of(regions)  # noqa: SLF001
        return part

    def gather(self, block_ids: Sequence[int], slab: Slab, slots: Sequence[int], *, hold: bool = True) -> Transfer:
        """Copy blocks out of the paged cache, each to the slot at the same position.

        What vLLM computed so far on the current stream is copied, and what it computes next can't overwrite it before
        it has been copied.

        Args:
            block_ids: The blocks, by vLLM's ids.
            slab: Where to copy them.
            slots: As many different slots.
            hold: Whether what vLLM computes next waits until the blocks have been read. If not, nobody may write to
                them before the transfer has ended, or was told to hold compute back.

        Returns:
            The transfer. On CPUs it has ended. On a GPU, wait for it before the slots are published.

        Raises:
            ValueError: A block is the null block or out of range, a slot is out of range or comes twice, there
                aren't as many slots as blocks, or the slab's slots are too small. Nothing was copied.

        """
        blocks, targets = self._check(block_ids, slab, slots)
        _check_distinct(targets, "slot")
        return self._copier.gather(blocks, slab, targets, hold=hold)

    def scatter(self, slab: Slab, slots: Sequence[int], block_ids: Sequence[int], *, hold: bool = True) -> Transfer:
        """Copy blocks into the paged cache, from the slot at the same position.

        What vLLM computed so far on the current stream comes before, and what it computes next sees the blocks.

        Args:
            slab: Where to copy from.
            slots: The slots.
            block_ids: As many different blocks, by vLLM's ids.
            hold: Whether what vLLM computes next waits for the blocks. If not, nobody may use them before the transfer
                has ended, or was told to hold compute back.

        Returns:
            The transfer. On CPUs it has ended. On a GPU, wait for it before the slots are unpinned.

        Raises:
            ValueError: As for `gather`, except that no block may come twice.

        """
        blocks, sources = self._check(block_ids, slab, slots)
        _check_distinct(blocks, "block")
        return self._copier.scatter(slab, sources, blocks, hold=hold)

    def _check(self, block_ids: Sequence[int], slab: Slab, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        blocks, numbers = list(block_ids), list(slots)
        if len(blocks) != len(numbers):
            msg = f"{len(blocks)} blocks but {len(numbers)} slots"
            raise ValueError(msg)
        if slab.slot_bytes < self.block_bytes:
            msg = f"a block has {self.block_bytes} bytes, a slot of the slab {slab.slot_bytes}"
            raise ValueError(msg)
        if blocks and not 0 < min(blocks) <= max(blocks) < self.num_blocks:
            msg = (
                f"block ids must be in 1..{self.num_blocks - 1} (0 is vLLM's null block), "
                f"got {min(blocks)}..{max(blocks)}"
            )
            raise ValueError(msg)
        if numbers and not 0 <= min(numbers) <= max(numbers) < slab.num_slots:
            msg = f"slots must be in 0..{slab.num_slots - 1}, got {min(numbers)}..{max(numbers)}"
            raise ValueError(msg)
        return blocks, numbers


def _check_distinct(numbers: list[int], what: str) -> None:
    if len(set(numbers)) != len(numbers):
        msg = f"a {what} that is written comes twice"
        raise ValueError(msg)


def _copier(regions: Sequence[Region], devices: set[torch.device]) -> Copier:
    if len(devices) == 1:
        device = next(iter(devices))
        if device.type == "cpu":
            return HostCopier(regions, streaming_copy())
        if device.type == "cuda":
            return StagedCopier(regions, device, CudaStream(device))
    names = ", ".join(sorted(map(str, devices)))
    msg = (
        f"kvplug copies KV caches that are on the CPU or on one CUDA device, not on {names}: run without the connector."
    )
    raise UnsupportedError(msg)


def describe(layers: Sequence[Layer]) -> str:
    names = hashlib.sha256("\n".join(layer.name for layer in layers).encode()).hexdigest()[:16]
    kinds = ((len(list(same)), layout) for layout, same in groupby(layer.layout for layer in layers))
    return f"{len(layers)} layers (names {names}): " + "; ".join(f"{count} x {layout}" for count, layout in kinds)
