"""Digests of several fields that no other fields can produce."""

from __future__ import annotations

import hashlib
import struct

__all__ = ["DIGEST_SIZE", "tagged_digest"]

#: Bytes in a digest.
DIGEST_SIZE = hashlib.sha256().digest_size

_LENGTH = struct.Struct("<Q")


def tagged_digest(tag: str, *fields: bytes | None) -> bytes:
    """Hash fields so that what is hashed can be told back into the same fields, and no others.

    Each field is preceded by its length, an absent one (None) differs from an empty one, and the tag keeps digests
    for one purpose from ever being equal to digests for another.

    Args:
        tag: What the digest is for, for example `kvplug.lora`.
        fields: The values, in order.

    Returns:
        A SHA-256 digest, 32 bytes.

    """
    hasher = hashlib.sha256()
    for field in (tag.encode(), *fields):
        if field is None:
            hasher.update(b"\0")
        else:
            hasher.update(b"\1" + _LENGTH.pack(len(field)))
            hasher.update(field)
    return hasher.digest()
