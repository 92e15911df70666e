"""L1 and L2 in one process: what is written to L2 and when, what is read from it, what is brought ahead of need."""

from __future__ import annotations

from kvplug.store.tiered.make import make_store
from kvplug.store.tiered.store import TieredStore
from kvplug.store.tiered.writer import WritePolicy

__all__ = ["TieredStore", "WritePolicy", "make_store"]
