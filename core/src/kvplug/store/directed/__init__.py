"""A store whose bookkeeping is in the scheduler and whose memory is in the workers.

What is promised to vLLM's scheduler must be there when the workers load it. So one allocator, in the scheduler's half
of a connector, decides for the slabs of all ranks: a block has the same slot number in each. L2 tiers belong to the
workers, which have the bytes; the scheduler's half directs them with commands that travel in a step's metadata, and
hears of the results in what the workers report.

- `DirectedStore` is the scheduler's side,
- `Executor` is a worker's.
"""

from __future__ import annotations

from kvplug.store.directed.commands import Command
from kvplug.store.directed.executor import Executor
from kvplug.store.directed.store import DirectedStore

__all__ = ["Command", "DirectedStore", "Executor"]
