"""Blocks of one slab as values of a tier: where they are, what they are called, sealed and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplug.store.l2.codecs import decodable, decode
from kvplug.store.l2.value import HEADER_BYTES, Header, Problem, check, key_digest, seal

if TYPE_CHECKING:
    from kvplug.store.l2.codecs import Codec
    from kvplug.store.l2.keys import StorageKeys
    from kvplug.store.slab import Slab

__all__ = ["Blocks"]


class Blocks:
    """What a client needs to know of blocks. Safe from any thread.

    Args:
        slab: The memory; its slots have room for a header.
        keys: What blocks are called in a tier.
        layout: Digest of the layout of a block's bytes (`layout_digest`).
        codec: Encodes what is written; None for blocks as they are. Values of any codec are read.

    """

    def __init__(self, slab: Slab, keys: StorageKeys, layout: bytes, codec: Codec | None = None) -> None:
        self._slab = slab
        self._keys = keys
        self._layout = layout
        self._codec = codec
        self._decodable = decodable()
        #: Bytes of a block.
        self.payload_bytes = slab.slot_bytes

    @property
    def memory(self) -> memoryview:
        """All of the slab."""
        return self._slab.memory

    def name(self, key: bytes) -> bytes:
        """Return what a block is called in a tier, from now on."""
        return self._keys(key)

    def view(self, slot: int) -> memoryview:
        """Return a slot's memory, header first."""
        return self._slab.value_view(slot)

    def seal(self, name: bytes, view: memoryview) -> memoryview:
        """Return the value of a block.

        Args:
            name: What it is called.
            view: Its memory, header first. The header is written; with a codec, the value is elsewhere.

        """
        digest = key_digest(name)
        if self._codec is not None:
            stored = self._codec.encode(view[HEADER_BYTES : HEADER_BYTES + self.payload_bytes])
            if len(stored) < self.payload_bytes:
                value = memoryview(bytearray(HEADER_BYTES + len(stored)))
                value[HEADER_BYTES:] = stored
                codec = self._codec
                header = Header(self._layout, digest, self.payload_bytes, len(stored), codec.number, codec.parameter)
                return value[: seal(value, header)]
        return view[: seal(view, Header(self._layout, digest, self.payload_bytes, self.payload_bytes))]

    def accept(self, name: bytes, view: memoryview, length: int) -> Problem | None:
        """Check a value that was read into a slot, and decode it there. Returns what is wrong, if anything.

        Args:
            name: What was asked for.
            view: The slot's memory, header first.
            length: Bytes that were read.

        """
        found = check(
            view,
            length,
            layout=self._layout,
            key=key_digest(name),
            payload_bytes=self.payload_bytes,
            codecs=self._decodable,
        )
        if isinstance(found, Problem):
            return found
        if found.codec:
            stored = bytes(view[HEADER_BYTES:length])
            payload = view[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]
            if not decode(found.codec, stored, payload, found.parameter):
                return Problem.CODEC
        return None
