"""Under which keys a rank's blocks are in an L2 tier."""

from __future__ import annotations

import os

from kvplug.digest import tagged_digest
from kvplug.store.l2.value import FORMAT

__all__ = ["StorageKeys"]

_SUFFIX_BYTES = 16


class StorageKeys:
    """Turns block keys into the keys of a tier: the block's key, and a digest of whose part of the block it is.

    The part of a block that a rank holds (its layers and KV heads) isn't in the block's key, so it is in this one:
    ranks and engines of other parallel sizes share a tier without reading each other's parts.

    Args:
        shard: The rank's part of every block, as `kvplug.namespace.shard_id` says it, and how it is laid out.
        namespace: The setting `l2_namespace`: engines with different ones don't find each other's blocks.

    """

    def __init__(self, *shard: str, namespace: str = "") -> None:
        self._shard = tuple(text.encode() for text in (namespace, *shard))
        self._suffix = self._digest(None)

    def __call__(self, block_key: bytes) -> bytes:
        """Return the key of this rank's part of a block: 48 bytes for a block key of 32."""
        return block_key + self._suffix

    def renew(self) -> None:
        """Leave everything stored so far behind: from now on keys are those of nobody else, until the process ends.

        What makes people reset a cache is that equal keys stopped meaning equal blocks (weights were changed in
        place). Nobody can tell which other engine has the same change, so none may be shared with. A process that
        starts again reads its weights from their files, and may share with all that did so.
        """
        self._suffix = self._digest(os.urandom(16))

    def _digest(self, epoch: bytes | None) -> bytes:
        return tagged_digest(f"kvplug.shard.{FORMAT}", epoch, *self._shard)[:_SUFFIX_BYTES]
