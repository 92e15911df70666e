"""Host memory in slots of one size."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplug.errors import KvplugError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["Slab", "slot_stride"]

# Alignments worth having, best first: a page (direct disk I/O needs it), then a cache line.
_ALIGNMENTS = (4096, 64)
_MAX_PADDING = 0.01


def slot_stride(slot_bytes: int) -> int:
    """Return the distance in bytes between two slots that hold `slot_bytes` each.

    Slots are aligned to pages, or else to cache lines, if that costs at most 1 % of the memory.
    """
    for alignment in _ALIGNMENTS:
        stride = -(-slot_bytes // alignment) * alignment
        if stride - slot_bytes <= slot_bytes * _MAX_PADDING:
            return stride
    return slot_bytes


class Slab:
    """Memory for blocks: one anonymous mapping, cut into slots of equal size.

    The operating system backs the mapping page by page as slots are first written, so a slab costs what is used of
    it. A pinned slab is backed and locked at once, which is what the GPU's copy engines need.

    A slab holds bytes and knows nothing of what they mean; an `Allocator` says which slot holds what. Slots that are
    being written or read at the same time are the caller's business: pin them.

    Args:
        num_slots: Number of slots, at least 1.
        slot_bytes: Usable bytes of a slot, at least 1: one block over all layers (`PagedCache.block_bytes`).
        pin: Register the memory with CUDA, in one piece, so that copies to and from a GPU can run asynchronously.

    Attributes:
        num_slots: Number of slots.
        slot_bytes: Usable bytes of a slot.
        slot_stride: Bytes from one slot to the next: `slot_bytes`, plus at most 1 % so that slots are aligned.
        nbytes: Bytes mapped, paddings included.
        pinned: Whether the memory is registered with CUDA.

    Raises:
        KvplugError: The memory can't be had, or can't be pinned.

    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pin: bool = False) -> None:
        if num_slots < 1 or slot_bytes < 1:
            msg = f"a slab needs at least one slot of at least one byte, got {num_slots} slots of {slot_bytes} bytes"
            raise ValueError(msg)
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.slot_stride = slot_stride(slot_bytes)
        self.nbytes = -(-num_slots * self.slot_stride // mmap.PAGESIZE) * mmap.PAGESIZE
        self.pinned = False
        self._memory = _map(self.nbytes)
        self._rows: NDArray[np.uint8] | None = np.frombuffer(
            self._memory, dtype=np.uint8, count=num_slots * self.slot_stride
        ).reshape(num_slots, self.slot_stride)
        self._address = int(self._rows.ctypes.data)
        self._fields: dict[tuple[int, tuple[int, ...]], NDArray[np.uint8]] = {}
        self._tensor: torch.Tensor | None = None
        if pin:
            try:
                _cuda_register(self._address, self.nbytes)
            except BaseException:
                self.close()
                raise
            self.pinned = True

    @property
    def rows(self) -> NDArray[np.uint8]:
        """All slots, as a `uint8` array `[num_slots, slot_stride]` on the slab's own memory."""
        if self._rows is None:
            raise ValueError("the slab is closed")
        return self._rows

    @property
    def tensor(self) -> torch.Tensor:
        """All slots, as a `uint8` tensor `[num_slots, slot_stride]` on the slab's own memory. Imports torch."""
        if self._tensor is None:
            import torch

            self._tensor = torch.from_numpy(self.rows)
        return self._tensor

    def address(self, slot: int) -> int:
        """Return the address of a slot's first byte.

        Raises:
            IndexError: There is no such slot.

        """
        if not 0 <= slot < self.num_slots:
            msg = f"slot {slot} is not in 0..{self.num_slots - 1}"
            raise IndexError(msg)
        if self._rows is None:
            raise ValueError("the slab is closed")
        return self._address + slot * self.slot_stride

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return a slot's bytes, as a writable `uint8` array `[slot_bytes]` on the slab's own memory.

        Raises:
            IndexError: There is no such slot.

        """
        if not 0 <= slot < self.num_slots:
            msg = f"slot {slot} is not in 0..{self.num_slots - 1}"
            raise IndexError(msg)
        return self.rows[slot, : self.slot_bytes]

    def field(self, offset: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the same part of every slot, as a `uint8` array `[num_slots, *shape]` on the slab's own memory.

        The array is made once for each part and kept until the slab is closed, so that copy loops may ask for it
        again and again.

        Args:
            offset: First byte of the part, counted from the slot's first byte.
            shape: Shape of the part, in bytes, in C order.

        Raises:
            ValueError: The part is not within a slot.

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

        Memory that arrays or tensors of the slab still refer to is given back when the last of them is gone. Copies
        that are still running on a GPU must have ended before. Closing again does nothing.
        """
        if self._rows is None:
            return
        if self.pinned:
            _cuda_unregister(self._address)
            self.pinned = False
        self._rows = self._tensor = None
        self._fields.clear()
        try:
            self._memory.close()
        except BufferError:
            # Somebody holds a view; the mapping goes with it.
            del self._memory


def _map(nbytes: int) -> mmap.mmap:
    try:
        # Private: shared anonymous memory would count as shm, which containers limit.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        msg = (
            f"Can't allocate {nbytes} bytes ({nbytes / 2**30:.1f} GiB) of host memory for KV blocks ({error}): "
            "set a smaller capacity, or give the process more memory."
        )
        raise KvplugError(msg) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # First touch is what makes a new slab slow; huge pages make it 512 times rarer.
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _cuda_register(address: int, nbytes: int) -> None:
    """Pin memory that CUDA didn't allocate."""
    error: object
    try:
        error = _cudart().cudaHostRegister(address, nbytes, 0)
    except (RuntimeError, AssertionError) as exception:  # no driver, no device, or torch without CUDA
        error = exception
    if isinstance(error, Exception) or int(error) != 0:  # type: ignore[call-overload]
        msg = (
            f"Can't pin {nbytes} bytes ({nbytes / 2**30:.1f} GiB) of host memory for KV blocks "
            f"(cudaHostRegister: {error}): set a smaller capacity, or raise the limit of locked memory (ulimit -l)."
        )
        raise KvplugError(msg) from (error if isinstance(error, Exception) else None)


def _cuda_unregister(address: int) -> None:
    _cudart().cudaHostUnregister(address)
