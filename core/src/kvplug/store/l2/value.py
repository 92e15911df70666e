"""What an L2 tier stores: a block behind a header that says what it is, with a checksum over both.

A value is the header, 64 bytes, and then the block's bytes as a codec left them. All numbers are little-endian:

| offset | bytes | |
|---|---|---|
| 0 | 4 | `KVPB` |
| 4 | 2 | version of this format |
| 6 | 1 | codec (`kvplug.store.l2.codecs`) |
| 7 | 1 | the codec's parameter |
| 8 | 8 | bytes of the block |
| 16 | 8 | bytes that follow the header |
| 24 | 16 | digest of the layout: what the block's bytes mean |
| 40 | 8 | digest of the key |
| 48 | 16 | XXH3-128 of the header, with these 16 bytes as zeros, and of what follows it |

The digests are there against mistakes and damage, not against forgery: whoever can write to a tier can write any block.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

import xxhash

from kvplug.digest import tagged_digest

__all__ = ["FORMAT", "HEADER_BYTES", "Header", "Problem", "check", "key_digest", "layout_digest", "seal"]

#: Version of the header, and of what a layout's digest is made of. Values of another version are misses.
FORMAT = 1
#: Bytes before the block.
HEADER_BYTES = 64

_MAGIC = b"KVPB"
_HEADER = struct.Struct("<4sHBBQQ16s8s16s")
_NO_CHECKSUM = bytes(16)


class Problem(Enum):
    """Why a value isn't what was asked for."""

    TRUNCATED = "it is shorter than it says"
    FOREIGN = "it isn't one of kvplug's"
    FORMAT = "it has another version of the format"
    CODEC = "it can't be decoded here"
    LAYOUT = "its bytes have another layout"
    KEY = "it is another block"
    LENGTH = "it has another length"
    CHECKSUM = "it is damaged"


@dataclass(frozen=True)
class Header:
    """What a value says of itself.

    Attributes:
        layout: Digest of the layout (`layout_digest`).
        key: Digest of the key (`key_digest`).
        payload_bytes: Bytes of the block, decoded.
        stored_bytes: Bytes that follow the header.
        codec: The codec's number; 0 for the block as it is.
        parameter: The codec's parameter.

    """

    layout: bytes
    key: bytes
    payload_bytes: int
    stored_bytes: int
    codec: int = 0
    parameter: int = 0


def layout_digest(*fields: str) -> bytes:
    """Digest what decides the meaning of a block's bytes, 16 bytes.

    Args:
        fields: Texts, in order: the rank's shard, the layout of its paged cache.

    """
    return tagged_digest(f"kvplug.value.{FORMAT}", *(field.encode() for field in fields))[:16]


def key_digest(key: bytes) -> bytes:
    """Digest a tier's key, 8 bytes: enough to notice that a tier mixed two values up."""
    return xxhash.xxh3_64_digest(key)


def seal(value: memoryview, header: Header) -> int:
    """Write the header, with the checksum, in front of what is in `value` already.

    Args:
        value: Header and stored bytes, or more.
        header: What to say.

    Returns:
        The value's length in bytes.

    """
    length = HEADER_BYTES + header.stored_bytes
    if length > len(value):
        msg = f"{header.stored_bytes} bytes behind the header don't fit into {len(value)}"
        raise ValueError(msg)
    # In one assignment: another thread may be sealing the same block for another tier.
    value[:HEADER_BYTES] = _pack(header, _checksum(_pack(header, _NO_CHECKSUM), value[HEADER_BYTES:length]))
    return length


def check(
    value: memoryview, length: int, *, layout: bytes, key: bytes, payload_bytes: int, codecs: frozenset[int]
) -> Header | Problem:
    """Find out whether a value is whole, and the one that was asked for.

    Args:
        value: What was read, or more.
        length: Bytes that were read.
        layout: Digest of the layout that it must have.
        key: Digest of its key.
        payload_bytes: Bytes that the block must have.
        codecs: Numbers of the codecs that can be decoded.

    Returns:
        What it says of itself, or the first thing that is wrong.

    """
    if length < HEADER_BYTES:
        return Problem.TRUNCATED
    magic, version, codec, parameter, payload, stored, its_layout, its_key, checksum = _HEADER.unpack_from(value)
    header = Header(its_layout, its_key, payload, stored, codec, parameter)
    problem = None
    if magic != _MAGIC:
        problem = Problem.FOREIGN
    elif version != FORMAT:
        problem = Problem.FORMAT
    elif length != HEADER_BYTES + stored:
        problem = Problem.TRUNCATED if length < HEADER_BYTES + stored else Problem.LENGTH
    elif _checksum(_pack(header, _NO_CHECKSUM), value[HEADER_BYTES:length]) != checksum:
        problem = Problem.CHECKSUM
    elif its_layout != layout:
        problem = Problem.LAYOUT
    elif its_key != key:
        problem = Problem.KEY
    elif payload != payload_bytes or (codec == 0 and stored != payload):
        problem = Problem.LENGTH
    elif codec not in codecs:
        problem = Problem.CODEC
    return problem or header


def _pack(header: Header, checksum: bytes) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        FORMAT,
        header.codec,
        header.parameter,
        header.payload_bytes,
        header.stored_bytes,
        header.layout,
        header.key,
        checksum,
    )


def _checksum(header: bytes, stored: memoryview) -> bytes:
    hasher = xxhash.xxh3_128(header)
    hasher.update(stored)
    return hasher.digest()
