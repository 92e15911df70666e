"""The block store: where blocks that left vLLM's paged KV cache are kept.

The first tier is host memory, in two parts that can live in different processes:

- a `Slab` is memory: fixed-size slots, each as large as one block over all layers. One per worker.
- an `Allocator` is bookkeeping: which key is in which slot, which slots are pinned, what to evict. It knows slot
  numbers and nothing of memory, so that one in a scheduler can direct the slabs of many workers: slot numbers are all
  that has to travel.

`MemoryTier` is both in one process. Eviction policies are classes that register under a name (`kvplug.store.policies`).
"""

from __future__ import annotations

from kvplug.store.allocator import Allocator, SlotRef
from kvplug.store.memory import MemoryTier
from kvplug.store.policies import (
    FIFO,
    LRU,
    S3FIFO,
    EvictionPolicy,
    make_policy,
    policy_names,
    register_policy,
)
from kvplug.store.slab import Slab

__all__ = [
    "FIFO",
    "LRU",
    "S3FIFO",
    "Allocator",
    "EvictionPolicy",
    "MemoryTier",
    "Slab",
    "SlotRef",
    "make_policy",
    "policy_names",
    "register_policy",
]
