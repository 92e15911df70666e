"""What to evict from a full tier: policies, chosen by name.

- `fifo`: what was stored first goes first.
- `lru`: what was used longest ago goes first.
- `s3fifo`: what was used only when it was stored goes first, so that a scan doesn't wash out what is used again.

To add one, derive from `EvictionPolicy` and register the class under the name that the setting uses:

    @register_policy("mru")
    class MRU(EvictionPolicy): ...
"""

from __future__ import annotations

from kvplug.store.policies.base import EvictionPolicy, make_policy, policy_names, register_policy
from kvplug.store.policies.fifo import FIFO
from kvplug.store.policies.ghosts import GhostQueue
from kvplug.store.policies.lru import LRU
from kvplug.store.policies.s3fifo import S3FIFO
from kvplug.store.policies.slot_queue import SlotQueue

__all__ = [
    "FIFO",
    "LRU",
    "S3FIFO",
    "EvictionPolicy",
    "GhostQueue",
    "SlotQueue",
    "make_policy",
    "policy_names",
    "register_policy",
]
