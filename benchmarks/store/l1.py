"""The memory tier: copies beside memcpy, and what its bookkeeping takes at a million entries."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.common.figures import Figure, spread
from benchmarks.common.processes import in_child
from benchmarks.common.timing import alternately

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplug.store import Allocator

__all__ = ["measure"]

_MIB = 1 << 20
_PASS = 256 * _MIB
_SIZES = (1 * _MIB, 4 * _MIB)
_BATCH = 128
_POLICIES = ("fifo", "lru", "s3fifo")


def measure(*, quick: bool = False) -> list[Figure]:
    """Measure copies of blocks of 1 and 4 MiB, then lookup, eviction and memory of tiers of up to a million entries."""
    copies = {size: in_child(_copies, size, 3 if quick else 31) for size in _SIZES}
    entries = (1_000, 20_000) if quick else (10_000, 100_000, 1_000_000)
    books = {(policy, count): in_child(_bookkeeping, policy, count) for policy in _POLICIES for count in entries}
    largest = max(entries)

    def figure(name: str, part: int, limit: float, unit: str) -> Figure:
        # Memory of a small tier is lost in what the process takes anyway.
        shown = [(policy, count) for policy, count in books if name != "l1_bytes_per_entry" or count == largest]
        return Figure(
            name,
            max(books[policy, largest][part] for policy in _POLICIES),
            unit,
            at_most=limit,
            detail="highest of the policies at the most entries; "
            + ", ".join(f"{policy} {count:,}: {books[policy, count][part]:.3g}" for policy, count in shown),
        )

    return [
        *(
            Figure(
                f"l1_{way}_vs_memcpy",
                min(ratios[way][0] for ratios in copies.values()),
                at_least=0.85,
                detail="; ".join(f"{size // _MIB} MiB: {ratios[way][1]}" for size, ratios in copies.items()),
            )
            for way in ("put", "get")
        ),
        figure("l1_lookup_us_1m", 0, 5, "us"),
        figure("l1_evict_us_1m", 1, 5, "us"),
        figure("l1_bytes_per_entry", 2, 300, "B"),
    ]


def _copies(size: int, repeats: int) -> dict[str, tuple[float, str]]:
    """Return for both ways the median ratio of throughput to memcpy's, and what it consists of."""
    from kvplug.store import MemoryTier

    count = _PASS // size
    # Room for half a pass more, so that what is put evicts.
    tier = MemoryTier.with_capacity(_PASS * 3 // 2, size, header_bytes=64)
    blocks = np.ones((count, size), np.uint8)
    other = np.ones((count, size), np.uint8)
    tier.slab.rows[:] = 0  # all pages are there before the first run
    numbers = iter(range(1 << 40))
    keys: list[bytes] = []

    def put() -> None:
        keys[:] = [next(numbers).to_bytes(32, "little") for _ in range(count)]
        _put(tier, keys, blocks)

    def get() -> None:
        with tier.reading(keys) as slots:
            if len(slots) != count:
                raise AssertionError(f"{len(slots)} of {count} blocks are there")
            for row, slot in zip(other, slots, strict=True):
                row[:] = tier.slab.view(slot)

    def memcpy() -> None:
        for target, source in zip(other, blocks, strict=True):
            target[:] = source

    put_seconds, get_seconds, raw_seconds = alternately([put, get, memcpy], repeats)
    tier.close()
    result = {}
    for way, seconds in (("put", put_seconds), ("get", get_seconds)):
        ratios = [raw / ours for raw, ours in zip(raw_seconds, seconds, strict=True)]
        rate = _PASS / median(seconds) / 1e9
        result[way] = median(ratios), f"median of {spread(ratios)}, {rate:.3g} GB/s"
    return result


def _put(tier: object, keys: list[bytes], blocks: NDArray[np.uint8]) -> None:
    from kvplug.store import MemoryTier

    assert isinstance(tier, MemoryTier)
    with tier.writing(keys) as slots:
        for row, slot in zip(blocks, slots, strict=True):
            assert slot is not None
            tier.slab.view(slot)[:] = row


def _bookkeeping(policy: str, entries: int) -> tuple[float, float, float]:
    """Return microseconds per lookup and per eviction, and bytes per entry, of an allocator that is full.

    A lookup finds a random key, and pins and unpins it. An eviction makes room for a new key, and publishes that; it is
    measured in a tier where nothing was used, and in one where all was, and the dearer one counts. Keys come in
    batches, like those of a request, each with other keys; the best batch counts.
    """
    from kvplug.store import Allocator, make_policy

    gc.collect()
    before = _resident()
    allocator = Allocator(entries, make_policy(policy, entries))
    for first in range(0, entries, _BATCH):
        refs = allocator.reserve(_keys(range(first, min(first + _BATCH, entries))))
        allocator.publish([ref for ref in refs if ref is not None])
    gc.collect()
    nbytes = (_resident() - before) / entries

    unused = _evict(allocator, entries)
    generator = np.random.default_rng(0)
    # What the evictions left, wherever the policy found them.
    first = min(200 * _BATCH, entries)
    lookups = []
    for _ in range(400):
        keys = [
            key
            for key in _keys(generator.integers(first, entries + 200 * _BATCH, 2 * _BATCH).tolist())
            if allocator.prefix_length([key])
        ]
        start = time.thread_time()
        pinned = allocator.pin_prefix(keys)
        allocator.unpin(pinned)
        seconds = time.thread_time() - start
        if len(pinned) != len(keys):
            raise AssertionError(f"{len(pinned)} of {len(keys)} keys that are there were found")
        if keys:
            lookups.append(seconds / len(keys) * 1e6)
    for number in range(0, entries + 200 * _BATCH, _BATCH):
        for key in _keys(range(number, number + _BATCH)):
            allocator.touch_prefix([key])
    used = _evict(allocator, entries + 200 * _BATCH)
    return min(lookups), max(unused, used), nbytes


def _evict(allocator: Allocator, next_number: int) -> float:
    times = []
    evictions = allocator.evictions
    for batch in range(200):
        first = next_number + batch * _BATCH
        keys = _keys(range(first, first + _BATCH))
        start = time.thread_time()
        refs = allocator.reserve(keys)
        allocator.publish([ref for ref in refs if ref is not None])
        times.append((time.thread_time() - start) / _BATCH * 1e6)
    if allocator.evictions - evictions != 200 * _BATCH:
        raise AssertionError(f"{allocator.evictions - evictions} evictions for {200 * _BATCH} keys")
    return min(times)


def _keys(numbers: range | list[int]) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
