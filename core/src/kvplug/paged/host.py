"""Copies between paged KV caches and slabs that are both in host memory."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplug.paged.streaming import LINE
from kvplug.paged.transfer import DONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvplug.paged.layout import Region
    from kvplug.paged.streaming import StreamingCopy
    from kvplug.paged.transfer import Transfer
    from kvplug.store.slab import Slab

__all__ = ["HostCopier"]


class HostCopier:
    """Copies block by block, straight from where a block is to where it goes, without threads of its own.

    Blocks that consist of whole cache lines are streamed, all in one call. Others, and all where that
    can't be had, are copied by numpy, region by region. (torch's `index_select` would copy twice, and its thread
    barriers collapse on busy cores.)

    Args:
        regions: Where the blocks are.
        streaming: What `kvplug.paged.streaming.streaming_copy` returned.

    """

    def __init__(self, regions: Sequence[Region], streaming: StreamingCopy | None) -> None:
        self._views = [np.asarray(_RegionMemory(region)) for region in regions]
        self._fields = [(region.slot_offset, (*region.sizes, region.run)) for region in regions]
        self._runs = _Runs(regions)
        self._streaming = streaming

    def of(self, regions: Sequence[Region]) -> HostCopier:
        """Return a copier of fewer regions, which lie in slots as they do here."""
        return HostCopier(regions, self._streaming)

    def gather(
        self,
        block_ids: list[int],
        slab: Slab,
        slots: list[int],
        *,
        hold: bool = True,  # noqa: ARG002
    ) -> Transfer:
        """Copy each block to the slot at the same position. It has ended then, so there is nothing to hold."""
        if self._streaming is not None and self._runs.are_lines_in(slab):
            runs = self._runs
            self._streaming(runs.in_slots(slab, slots), runs.in_blocks(block_ids), runs.sizes(len(slots)))
            return DONE
        pairs = self._pairs(slab)
        for block, slot in zip(block_ids, slots, strict=True):
            for cache, field in pairs:
                field[slot] = cache[block]
        return DONE

    def scatter(
        self,
        slab: Slab,
        slots: list[int],
        block_ids: list[int],
        *,
        hold: bool = True,  # noqa: ARG002
    ) -> Transfer:
        """Copy each slot to the block at the same position. It has ended then, so there is nothing to hold."""
        if self._streaming is not None and self._runs.are_lines_in(slab):
            runs = self._runs
            self._streaming(runs.in_blocks(block_ids), runs.in_slots(slab, slots), runs.sizes(len(slots)))
            return DONE
        pairs = self._pairs(slab)
        for block, slot in zip(block_ids, slots, strict=True):
            for cache, field in pairs:
                cache[block] = field[slot]
        return DONE

    def _pairs(self, slab: Slab) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Return, for each region, the blocks' bytes in the cache and in the slab."""
        return [(cache, slab.field(*field)) for cache, field in zip(self._views, self._fields, strict=True)]


class _Runs:
    """The runs of contiguous bytes that a block consists of, over all regions, in the order of a slot."""

    def __init__(self, regions: Sequence[Region]) -> None:
        starts = [_run_starts(region) for region in regions]
        counts = [len(offsets) for offsets in starts]
        #: Address of each run in block 0, and bytes from there to the same run in block 1.
        self._start = np.concatenate(starts)
        self._stride = np.repeat(np.array([region.block_stride for region in regions], dtype=np.uintp), counts)
        self._size = np.repeat(np.array([region.run for region in regions], dtype=np.uintp), counts)
        #: Byte of each run in a slot. The regions follow each other there.
        self._slot_offset = np.cumsum(self._size, dtype=np.uintp) - self._size + np.uintp(regions[0].slot_offset)
        self._grain = gcd(
            regions[0].slot_offset,
            *(int(number) for array in (self._start, self._stride, self._size) for number in array),
        )

    def are_lines_in(self, slab: Slab) -> bool:
        """Return whether all runs, in the cache and in the slab, start and end where cache lines do."""
        return gcd(self._grain, slab.address(0), slab.slot_stride) % LINE == 0

    def in_blocks(self, block_ids: list[int]) -> NDArray[np.uintp]:
        """Return the addresses of the runs of blocks."""
        blocks = np.array(block_ids, dtype=np.uintp)
        addresses: NDArray[np.uintp] = (blocks[:, None] * self._stride + self._start).ravel()
        return addresses

    def in_slots(self, slab: Slab, slots: list[int]) -> NDArray[np.uintp]:
        """Return the addresses of the runs in slots."""
        starts = np.array(slots, dtype=np.uintp) * np.uintp(slab.slot_stride) + np.uintp(slab.address(0))
        addresses: NDArray[np.uintp] = (starts[:, None] + self._slot_offset).ravel()
        return addresses

    def sizes(self, num_blocks: int) -> NDArray[np.uintp]:
        """Return the lengths in bytes of the runs of as many blocks."""
        return np.tile(self._size, num_blocks)


def _run_starts(region: Region) -> NDArray[np.uintp]:
    """Return the addresses of a region's runs in block 0, in the order of a slot."""
    starts = np.array([region.storage.data_ptr() + region.offset], dtype=np.uintp)
    for size, stride in zip(region.sizes, region.strides, strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.uintp) * np.uintp(stride)).ravel()
    return starts


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
