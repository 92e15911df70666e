"""Memory that the block store takes beyond the blocks in it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from benchmarks.common.figures import Figure
from benchmarks.common.processes import in_child

__all__ = ["measure"]

_TOTAL = 256 << 20

#: Bytes of a block over all layers: of a small model with short blocks, one that needs padding, of a large model.
_BLOCKS = (32 << 10, 206_900, 1 << 20)


def measure() -> list[Figure]:
    """Measure how much a process grows by a tier in which every slot is written and published."""
    overheads = {block: in_child(_overhead, block) for block in _BLOCKS}
    return [
        Figure(
            "slab_overhead",
            max(overheads.values()),
            at_most=1.02,
            detail="highest of "
            + ", ".join(f"{value:.4f} (blocks of {block} B)" for block, value in overheads.items()),
        )
    ]


def _overhead(block_bytes: int) -> float:
    """Return bytes held, bookkeeping included, over bytes of blocks."""
    from kvplug.store import MemoryTier

    gc.collect()
    before = _resident()
    tier = MemoryTier.with_capacity(_TOTAL, block_bytes)
    num_blocks = tier.allocator.capacity
    for first in range(0, num_blocks, 64):
        keys = [number.to_bytes(32, "little") for number in range(first, min(first + 64, num_blocks))]
        with tier.writing(keys) as slots:
            for slot in slots:
                assert slot is not None
                tier.slab.view(slot)[:] = 1
    held = _resident() - before
    if tier.allocator.used != num_blocks or held < num_blocks * block_bytes // 2:
        raise AssertionError(f"{tier.allocator.used} of {num_blocks} slots are used, {held} bytes were taken")
    tier.close()
    return held / (num_blocks * block_bytes)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
