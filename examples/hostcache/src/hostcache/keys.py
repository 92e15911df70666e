"""Which requests can be cached, and the keys of their blocks."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Any


def is_cacheable(request: Any) -> bool:
    """Say whether a request's KV depends on its token ids and on nothing else, and may be reused."""
    return not (
        request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or request.mm_features
        or request.lora_request is not None
        or request.cache_salt
        or request.pooling_params is not None
        or getattr(request, "resumable", False)  # streaming input: its tokens can change
        or getattr(request, "skip_reading_prefix_cache", False)
    )


@dataclass
class CachedRequest:
    """A request that vLLM has given blocks to, with the keys of its full blocks."""

    request: Any
    keys: list[bytes] = field(default_factory=list)

    def update_keys(self, seed: bytes, block_size: int) -> list[bytes]:
        """Extend the keys to all tokens that are known now, and return them.

        Each key commits to all tokens up to its block's end: it is a hash of the key before it and the block's tokens.
        """
        tokens = self.request.all_token_ids
        while (end := (len(self.keys) + 1) * block_size) <= len(tokens):
            block = array("q", tokens[end - block_size : end]).tobytes()
            self.keys.append(hashlib.sha256((self.keys[-1] if self.keys else seed) + block).digest())
        return self.keys
