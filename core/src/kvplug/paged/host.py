"""Copies between paged KV caches and slabs that are both in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvplug.paged.transfer import DONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvplug.paged.layout import Region
    from kvplug.paged.transfer import Transfer
    from kvplug.store.slab import Slab

__all__ = ["HostCopier"]


class HostCopier:
    """Copies block by block, straight from where a block is to where it goes.

    One numpy assignment moves a region of a block: numpy walks over its runs in C, without the interpreter's lock and
    without threads of its own. Nothing is allocated. (torch's `index_select` would copy twice, and its thread
    barriers collapse on busy cores.)
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._caches = [np.asarray(_RegionMemory(region)) for region in regions]
        self._fields = [(region.slot_offset, (*region.sizes, region.run)) for region in regions]

    def gather(self, block_ids: list[int], slab: Slab, slots: list[int]) -> Transfer:
        """Copy each block to the slot at the same position."""
        pairs = self._pairs(slab)
        for block, slot in zip(block_ids, slots, strict=True):
            for cache, field in pairs:
                field[slot] = cache[block]
        return DONE

    def scatter(self, slab: Slab, slots: list[int], block_ids: list[int]) -> Transfer:
        """Copy each slot to the block at the same position."""
        pairs = self._pairs(slab)
        for block, slot in zip(block_ids, slots, strict=True):
            for cache, field in pairs:
                cache[block] = field[slot]
        return DONE

    def _pairs(self, slab: Slab) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Return, for each region, the blocks' bytes in the cache and in the slab."""
        return [(cache, slab.field(*field)) for cache, field in zip(self._caches, self._fields, strict=True)]


class _RegionMemory:
    """A region's bytes for numpy, which knows neither torch's bfloat16 nor its float8 types. Keeps the memory alive."""

    def __init__(self, region: Region) -> None:
        self._storage = region.storage
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "data": (region.storage.data_ptr() + region.offset, False),
            "shape": (region.num_blocks, *region.sizes, region.run),
            "strides": (region.block_stride, *region.strides, 1),
        }
