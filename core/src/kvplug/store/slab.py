"""Host memory in slots of one size."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from kvplug.store.host_memory import HostMemory

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["Slab", "slot_stride"]

# Alignments worth having, best first: a page (direct disk I/O needs it), then a cache line.
_ALIGNMENTS = (4096, 64)
_MAX_PADDING = 0.01


def slot_stride(slot_bytes: int, header_bytes: int = 0) -> int:
    """Return the distance in bytes between two slots that hold a header and `slot_bytes` each.

    Slots are aligned to pages, or else to cache lines, if that costs at most 1 % of the memory.
    """
    value_bytes = header_bytes + slot_bytes
    for alignment in _ALIGNMENTS:
        stride = -(-value_bytes // alignment) * alignment
        if stride - value_bytes <= slot_bytes * _MAX_PADDING:
            return stride
    return value_bytes


class Slab:
    """Memory for blocks: one anonymous mapping, cut into slots of equal size.

    A slot is a header, which may be empty, the payload, and perhaps a padding. Header and payload together are a
    *value*: what L2 tiers keep, straight from and into the slab (`value_view`). All else here speaks of payloads.

    The operating system backs the mapping page by page as slots are first written, so a slab costs what is used of
    it. In the background all of it is backed, and pinned, as GPUs' copy engines want it, without anybody waiting
    (`HostMemory`).

    A slab holds bytes and knows nothing of what they mean; an `Allocator` says which slot holds what. Slots that are
    being written or read at the same time are the caller's business: pin them.

    Args:
        num_slots: Number of slots, at least 1.
        slot_bytes: Bytes of a slot's payload, at least 1: one block over all layers (`PagedCache.block_bytes`).
        header_bytes: Bytes in front of each payload. A multiple of 64 leaves payloads aligned to cache lines.
        pin: Register the memory with CUDA, in one piece, so that copies to and from a GPU can run asynchronously.
        background: Back the memory, and pin it, in the background.

    Attributes:
        num_slots: Number of slots.
        slot_bytes: Bytes of a slot's payload.
        header_bytes: Bytes of a slot's header.
        slot_stride: Bytes from one slot to the next: header and payload, plus at most 1 % so that slots are aligned.
        nbytes: Bytes mapped, paddings included.

    Raises:
        KvplugError: The memory can't be had, or can't be pinned.

    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, header_bytes: int = 0, pin: bool = False, background: bool = False
    ) -> None:
        if num_slots < 1 or slot_bytes < 1 or header_bytes < 0:
            msg = (
                "a slab needs at least one slot of at least one byte, "
                f"got {num_slots} slots of {slot_bytes} bytes behind headers of {header_bytes}"
            )
            raise ValueError(msg)
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.header_bytes = header_bytes
        self.slot_stride = slot_stride(slot_bytes, header_bytes)
        self.nbytes = -(-num_slots * self.slot_stride // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = HostMemory(self.nbytes, pin=pin, background=background)
        self._slots: NDArray[np.uint8] | None = np.frombuffer(
            self._memory.view, dtype=np.uint8, count=num_slots * self.slot_stride
        ).reshape(num_slots, self.slot_stride)
        self._fields: dict[tuple[int, tuple[int, ...]], NDArray[np.uint8]] = {}
        self._slots_tensor: torch.Tensor | None = None

    @property
    def rows(self) -> NDArray[np.uint8]:
        """All payloads and paddings, a `uint8` array `[num_slots, slot_stride - header_bytes]` on the slab's memory."""
        if self._slots is None:
            raise ValueError("the slab is closed")
        return self._slots[:, self.header_bytes :]

    @property
    def tensor(self) -> torch.Tensor:
        """All payloads and paddings, as `rows`, but a tensor. Imports torch."""
        return self.slots_tensor[:, self.header_bytes :]

    @property
    def slots_tensor(self) -> torch.Tensor:
        """All slots whole, with their headers, a contiguous `uint8` tensor `[num_slots, slot_stride]`. Imports torch.

        For copies of many neighbouring slots at once.
        """
        if self._slots is None:
            raise ValueError("the slab is closed")
        if self._slots_tensor is None:
            import torch

            self._slots_tensor = torch.from_numpy(self._slots)
        return self._slots_tensor

    @property
    def memory(self) -> memoryview:
        """All of the slab's memory, as one writable memoryview of format "B", for tiers that register it."""
        return self._memory.view

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with CUDA by now."""
        return self._memory.pinned

    def wait_prepared(self, timeout: float | None = None) -> bool:
        """Wait for the background to end, at most `timeout` seconds, and return whether it has."""
        return self._memory.wait(timeout)

    def address(self, slot: int) -> int:
        """Return the address of the first byte of a slot's payload.

        Raises:
            IndexError: There is no such slot.

        """
        self._check(slot)
        return self._memory.address + slot * self.slot_stride + self.header_bytes

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return a slot's payload, as a writable `uint8` array `[slot_bytes]` on the slab's own memory.

        Raises:
            IndexError: There is no such slot.

        """
        slots = self._check(slot)
        return slots[slot, self.header_bytes : self.header_bytes + self.slot_bytes]

    def value_view(self, slot: int) -> memoryview:
        """Return a slot's header and payload, as one writable memoryview of format "B" on the slab's own memory.

        It keeps the memory, also after `close`: don't hold it for longer than the slot is yours.

        Raises:
            IndexError: There is no such slot.

        """
        self._check(slot)
        start = slot * self.slot_stride
        return self._memory.view[start : start + self.header_bytes + self.slot_bytes]

    def field(self, offset: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the same part of every payload, as a `uint8` array `[num_slots, *shape]` on the slab's own memory.

        The array is made once for each part and kept until the slab is closed, so that copy loops may ask for it
        again and again.

        Args:
            offset: First byte of the part, counted from the payload's first byte.
            shape: Shape of the part, in bytes, in C order.

        Raises:
            ValueError: The part is not within a payload.

        """
        field = self._fields.get((offset, shape))
        if field is None:
            size = int(np.prod(shape, dtype=np.int64))
            if offset < 0 or offset + size > self.slot_bytes:
                msg = f"bytes {offset}..{offset + size} are not within a slot of {self.slot_bytes} bytes"
                raise ValueError(msg)
            # Splitting an axis never copies.
            field = self.rows[:, offset : offset + size].reshape(self.num_slots, *shape)
            self._fields[offset, shape] = field
        return field

    def close(self) -> None:
        """Unpin the memory and give it back; a closed slab can't be used.

        Memory that arrays, tensors or memoryviews of the slab still refer to is given back when the last of them is
        gone. Copies that are still running on a GPU must have ended before. Closing again does nothing.
        """
        self._slots = self._slots_tensor = None
        self._fields.clear()
        self._memory.close()

    def _check(self, slot: int) -> NDArray[np.uint8]:
        if not 0 <= slot < self.num_slots:
            msg = f"slot {slot} is not in 0..{self.num_slots - 1}"
            raise IndexError(msg)
        if self._slots is None:
            raise ValueError("the slab is closed")
        return self._slots
