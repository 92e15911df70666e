"""vLLM's paged KV caches, read and written block by block, whatever their layout.

A `PagedCache` takes the tensors that vLLM hands to `register_kv_caches` for one KV-cache group, finds out where each
block is, and copies blocks to and from the slots of a `kvplug.store.Slab`, byte for byte. Imports torch.
"""

from __future__ import annotations

from kvplug.paged.cache import PagedCache
from kvplug.paged.transfer import Transfer

__all__ = ["PagedCache", "Transfer"]
