"""Copies between a paged KV cache on a device and a slab in host memory, through a staging buffer on the device.

A block on a device is many small pieces, and a bus wants few large transfers: blocks are gathered on the device into
rows that look like slots, and whole runs of rows cross the bus at once.

What is here is device-independent torch code, tested on CPU tensors. It has not yet been run on a GPU.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from math import gcd
from typing import TYPE_CHECKING, Protocol

import torch

from kvplug.paged.transfer import DONE, Transfer
from kvplug.store.slab import slot_stride

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvplug.paged.layout import Region
    from kvplug.paged.transfer import Event
    from kvplug.store.slab import Slab

__all__ = ["CopyStream", "CudaStream", "StagedCopier"]

_STAGING_BYTES = 64 << 20

#: Headers of a slab's slots up to this size leave room for at least one row.
_MAX_HEADER_BYTES = 64
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class CopyStream(Protocol):
    """A queue of work beside the one that computes."""

    def wait_for_compute(self) -> None:
        """Let what is put on this stream next start after what is on the current (compute) stream by now."""

    def hold_compute(self, event: Event) -> None:
        """Let what is put on the current (compute) stream next start after `event`."""

    def record(self) -> Event:
        """Return an event that has come when all that is on this stream by now is done."""

    def active(self) -> AbstractContextManager[object]:
        """Put what torch does inside on this stream."""

    def indices(self, numbers: list[int]) -> torch.Tensor:
        """Return `numbers` as an int64 tensor on the device, without waiting for it. Called inside `active`."""


class CudaStream:
    """A CUDA stream of its own. Not yet run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait_for_compute(self) -> None:
        """Let the copy stream wait for the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def hold_compute(self, event: Event) -> None:
        """Let the current stream wait for an event of the copy stream."""
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]

    def record(self) -> Event:
        """Record an event on the copy stream; who waits for it sleeps instead of spinning."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def active(self) -> AbstractContextManager[object]:
        """Make the copy stream the current one."""
        return torch.cuda.stream(self._stream)

    def indices(self, numbers: list[int]) -> torch.Tensor:
        """Copy indices from pinned memory, which torch keeps until the copy is done."""
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)


class StagedCopier:
    """Copies blocks through a bounded staging buffer on their device.

    Args:
        regions: Where the blocks are.
        device: The device they are on.
        stream: The stream that copies.
        staging_bytes: Size of the staging buffer; at least one slot is taken in any case.

    """

    def __init__(
        self, regions: Sequence[Region], device: torch.device, stream: CopyStream, staging_bytes: int = _STAGING_BYTES
    ) -> None:
        self._regions = list(regions)
        self._stream = stream
        # One user at a time: the order of work on the stream is what keeps the staging buffer consistent.
        self._lock = threading.Lock()
        self._known_views: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        block_bytes = sum(region.nbytes for region in regions)
        row = slot_stride(block_bytes)
        nbytes = max(staging_bytes // row * row, slot_stride(block_bytes, _MAX_HEADER_BYTES))
        with stream.active():
            # Zeros: rows cross the bus whole, headers and paddings included.
            self._staging = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def of(self, regions: Sequence[Region]) -> StagedCopier:
        """Return a copier of fewer regions, which lie in slots as they do here, by the same buffer and stream."""
        part = copy(self)
        part._regions = list(regions)  # noqa: SLF001
        part._known_views = {}  # noqa: SLF001
        return part

    def gather(self, block_ids: list[int], slab: Slab, slots: list[int], *, hold: bool = True) -> Transfer:
        """Copy each block to the slot at the same position. Later compute waits for the reads, not for the bus."""
        if not block_ids:
            return DONE
        with self._lock, self._ordered(), self._stream.active():
            for rows, chunk in self._chunks(slab, slots, block_ids):
                blocks = self._stream.indices([block for _, block in chunk])
                for cache, field in self._views(slab):
                    torch.index_select(cache, 0, blocks, out=field[: len(chunk)])
                read = self._stream.record()
                for row, slot, count in _runs(chunk):
                    slab.slots_tensor[slot : slot + count].copy_(rows[row : row + count], non_blocking=True)
            end = self._stream.record()
        return self._transfer(end, read, hold=hold)

    def scatter(self, slab: Slab, slots: list[int], block_ids: list[int], *, hold: bool = True) -> Transfer:
        """Copy each slot to the block at the same position. Later compute waits for it."""
        if not block_ids:
            return DONE
        with self._lock, self._ordered(), self._stream.active():
            for rows, chunk in self._chunks(slab, slots, block_ids):
                blocks = self._stream.indices([block for _, block in chunk])
                for row, slot, count in _runs(chunk):
                    rows[row : row + count].copy_(slab.slots_tensor[slot : slot + count], non_blocking=True)
                for cache, field in self._views(slab):
                    cache.index_copy_(0, blocks, field[: len(chunk)])
            end = self._stream.record()
        return self._transfer(end, end, hold=hold)

    def _transfer(self, end: Event, usable: Event, *, hold: bool) -> Transfer:
        transfer = Transfer(end, lambda: self._stream.hold_compute(usable))
        if hold:
            transfer.hold_compute()
        return transfer

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """Start after compute; if something fails, wait for what was started, because nobody else can any more."""
        self._stream.wait_for_compute()
        try:
            yield
        except BaseException:
            self._stream.record().synchronize()
            raise

    def _chunks(
        self, slab: Slab, slots: list[int], block_ids: list[int]
    ) -> Iterator[tuple[torch.Tensor, list[tuple[int, int]]]]:
        """Yield pairs of slot and block, as many as fit into the staging buffer, and its rows.

        Ordered by slot, so that neighbours in the slab are neighbours in the buffer.
        """
        rows = self._rows(slab.slot_stride)
        pairs = sorted(zip(slots, block_ids, strict=True))
        for start in range(0, len(pairs), len(rows)):
            yield rows, pairs[start : start + len(rows)]

    def _rows(self, stride: int) -> torch.Tensor:
        """Return the staging buffer as rows of `stride` bytes, like the slots of a slab."""
        count = self._staging.numel() // stride
        if not count:
            msg = f"a slot of {stride} bytes doesn't fit into the staging buffer of {self._staging.numel()} bytes"
            raise ValueError(msg)
        return self._staging[: count * stride].view(count, stride)

    def _views(self, slab: Slab) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each region in the cache, `[num_blocks, *sizes, run]`, and in the rows, `[rows, *sizes, run]`.

        Both in words as wide as alignment allows: the device moves them one at a time.
        """
        layout = slab.slot_stride, slab.header_bytes
        if layout not in self._known_views:
            rows = self._rows(slab.slot_stride)
            self._known_views[layout] = [_views(region, rows, slab.header_bytes) for region in self._regions]
        return self._known_views[layout]


def _views(region: Region, rows: torch.Tensor, header_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    start = header_bytes + region.slot_offset
    word = gcd(8, region.offset, region.block_stride, *region.strides, region.run, start, rows.stride(0))
    shape = (*region.sizes, region.run // word)
    strides = (*(stride // word for stride in (region.block_stride, *region.strides)), 1)
    cache = torch.empty(0, dtype=_WORDS[word], device=rows.device)
    cache.set_(region.storage, region.offset // word, (region.num_blocks, *shape), strides)
    field = rows[:, start : start + region.nbytes]
    return cache, field.view(_WORDS[word]).view(len(rows), *shape)


def _runs(chunk: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield first row, first slot and length of each run of consecutive slots."""
    start = 0
    for row in range(1, len(chunk) + 1):
        if row == len(chunk) or chunk[row][0] != chunk[row - 1][0] + 1:
            yield start, chunk[start][0], row - start
            start = row
