"""The L2 tier `valkey`: a Valkey or Redis server, or a cluster of them.

It speaks the servers' protocol itself, over plain sockets, so that a value goes from the kernel straight into the
buffer that it is read into, and so that a deadline of 0.3 s is 0.3 s. It needs no client library.
"""

from __future__ import annotations

from kvplug.store.l2.valkey.settings import ValkeySettings
from kvplug.store.l2.valkey.tier import ValkeyTier

__all__ = ["ValkeySettings", "ValkeyTier"]
