"""Values of engines with other parallel sizes, and memory that they are read into."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug.store.l2.blocks import Blocks
from kvplug.store.l2.keys import StorageKeys
from kvplug.store.l2.value import HEADER_BYTES, layout_digest

if TYPE_CHECKING:
    from kvplug.paged.shares import Part

__all__ = ["PeerValue", "Scratch"]

#: Bytes that one call reads at a time, if that is a value at least.
_SCRATCH_BYTES = 8 << 20


class Scratch:
    """Memory that values are read into, in pieces of one size that are used again and again.

    There are never more than calls under way at the same time.

    Args:
        parts: The values that are read into it, each of which fits into a piece.

    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.nbytes = max([_SCRATCH_BYTES, *(_stride(part) for part in parts)])
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a piece that nobody else has. It begins where a page does."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, self.nbytes))

    def give_back(self, memory: memoryview) -> None:
        """Take a piece back that nobody reads or writes any more."""
        self._free.append(memory)


class PeerValue:
    """One of the values that make up a block: what it is called, whether it is whole, and what of it goes where."""

    def __init__(self, part: Part, namespace: str) -> None:
        self.moves = part.moves
        self.bytes = HEADER_BYTES + part.payload_bytes
        self.stride = _stride(part)
        # Of a slab, naming and checking need the length of a value only.
        length: Any = _Length(part.payload_bytes)
        keys = StorageKeys(part.shard, part.layout, namespace=namespace)
        self.blocks = Blocks(length, keys, layout_digest(part.shard, part.layout))


def _stride(part: Part) -> int:
    """Return the bytes that a value takes in memory, if each begins with a page, as direct I/O needs it."""
    return -(-(HEADER_BYTES + part.payload_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


class _Length:
    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
