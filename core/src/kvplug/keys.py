"""Keys of a request's KV blocks: a hash chain that is equal in every process.

The idea is vLLM's prefix cache: a block's key commits to the block and to everything before it, so equal keys mean
equal prefixes. vLLM's own hashes can't be used beyond its process: they may be seeded at random, and what goes into
them changes from release to release.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

from kvplug.digest import DIGEST_SIZE, tagged_digest
from kvplug.identity import RequestIdentity

__all__ = ["KEY_SIZE", "KeyChain"]

#: Bytes in a block's key.
KEY_SIZE = DIGEST_SIZE

_TOKEN_SIZE = 4
_TOKEN_TYPE = next(code for code in "IL" if array(code).itemsize == _TOKEN_SIZE)
_BLOCK_TAG = b"kvplug.block"
_TAIL_TAG = b"kvplug.tail"
_COUNT = struct.Struct("<I")
#: Length of the identifier, start of the feature relative to the block's first token, length of the feature.
_FEATURE = struct.Struct("<IqQ")
_NO_FEATURES = _COUNT.pack(0)


class KeyChain:
    """Keys of one request's full blocks, computed as its tokens come.

    A key is the SHA-256 of the key before it, the block's token ids and the multimodal items that overlap the block.
    The first block's parent is a digest of the namespace, the block size, and what holds for the whole request: its
    LoRA adapter and its cache salt. Each part has a fixed or a stated length, so no two different inputs are hashed as
    the same bytes.

    The chain belongs to one request. Preemption doesn't touch it: a resumed request has the same tokens, then more.
    """

    def __init__(self, namespace: bytes, block_size: int, identity: RequestIdentity) -> None:
        """Start a chain with no tokens.

        Args:
            namespace: The fingerprint of model and cache (`kvplug.namespace.namespace_fingerprint`).
            block_size: Tokens in a block.
            identity: What, besides the tokens, decides the request's KV (`kvplug.identity.identity_of`).

        Raises:
            ValueError: The block size isn't positive.

        """
        if block_size < 1:
            raise ValueError(f"A block has at least one token, not {block_size}.")
        self._block_size = block_size
        # First token, token after the last, identifier.
        self._features = [(f.offset, f.stop, f.identifier.encode("utf-8", "surrogatepass")) for f in identity.features]
        self._next_feature = 0
        self._start = self._parent = tagged_digest(
            "kvplug.request", namespace, block_size.to_bytes(8, "little"), identity.lora, identity.salt
        )
        #: One key of 32 bytes per full block, in order. Grows; not to be changed by the caller.
        self.keys: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that the keys cover: a multiple of the block size."""
        return len(self.keys) * self._block_size

    def extend(self, token_ids: Sequence[int]) -> int:
        """Append keys for the blocks that have become full.

        Only tokens that no key covers yet are read, so a call costs what is new.

        Args:
            token_ids: All token ids of the request so far, prompt and output: a list, or vLLM's read-only view of
                one (`Request.all_token_ids`). Ids of tokens that aren't known yet, or not accepted yet, don't belong
                in it.

        Returns:
            The number of keys.

        Raises:
            ValueError: There are fewer tokens than the keys cover (the list is another request's, or was cut), or an
                id isn't an integer from 0 to 2**32 - 1. Keys that were there before stay.

        """
        start = self.num_tokens
        available = len(token_ids)
        if available < start:
            raise ValueError(f"The keys cover {start} tokens, but the request has {available}.")
        stop = available - available % self._block_size
        if stop > start:
            self._append(_pack(token_ids[start:stop]), start)
        return len(self.keys)

    def tail(self, token_ids: Sequence[int], stop: int) -> bytes | None:
        """Return the key of the block that the first `stop` tokens begin and don't fill.

        It commits to those tokens and to nothing after them. It is never equal to the key of a full block.

        Args:
            token_ids: All token ids of the request so far, as in `extend`, which must have been called with them.
            stop: How many of them are meant.

        Returns:
            The key; None if they end with a full block.

        Raises:
            ValueError: The keys don't cover the blocks before it.

        """
        blocks, rest = divmod(stop, self._block_size)
        if not rest:
            return None
        if blocks > len(self.keys) or stop > len(token_ids):
            raise ValueError(f"The keys cover {self.num_tokens} tokens, but {stop} of {len(token_ids)} are asked for.")
        start = stop - rest
        index = 0
        while index < len(self._features) and self._features[index][1] <= start:
            index += 1
        extras = self._encode(index, start, stop)
        parent = self.keys[blocks - 1] if blocks else self._start
        tokens = _pack(token_ids[start:stop])
        return hashlib.sha256(_TAIL_TAG + parent + _COUNT.pack(rest) + tokens + extras).digest()

    def _append(self, tokens: bytes, start: int) -> None:
        """Append keys for whole blocks of packed tokens, the first of which is the request's token `start`."""
        keys = self.keys
        parent = self._parent
        block_bytes = self._block_size * _TOKEN_SIZE
        sha256 = hashlib.sha256
        for position in range(0, len(tokens), block_bytes):
            # Few requests have features; those that do are past them soon.
            extras = _NO_FEATURES
            if self._next_feature < len(self._features):
                extras = self._extras(start + position // _TOKEN_SIZE)
            parent = sha256(_BLOCK_TAG + parent + tokens[position : position + block_bytes] + extras).digest()
            keys.append(parent)
        self._parent = parent

    def _extras(self, start: int) -> bytes:
        """Encode the features that overlap the block whose first token is `start`, which comes after those before."""
        features, index = self._features, self._next_feature
        while index < len(features) and features[index][1] <= start:
            index += 1
        self._next_feature = index
        return self._encode(index, start, start + self._block_size)

    def _encode(self, index: int, start: int, stop: int) -> bytes:
        """Encode the features from one on that overlap the tokens from `start` to before `stop`.

        The whole feature's length goes in too: models that attend both ways inside an image make the KV of its
        first tokens depend on its last.
        """
        features = self._features
        extras, count = b"", 0
        while index < len(features) and features[index][0] < stop:
            offset, end, identifier = features[index]
            # Features may lie inside one another (the audio of a video), so a later one can end earlier.
            if end > start:
                extras += _FEATURE.pack(len(identifier), offset - start, end - offset) + identifier
                count += 1
            index += 1
        return _COUNT.pack(count) + extras


def _pack(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian 32-bit integers."""
    try:
        packed = array(_TOKEN_TYPE, token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"Token ids are integers from 0 to 2**32 - 1: {error}.") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
