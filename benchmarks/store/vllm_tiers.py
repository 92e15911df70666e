"""Bookkeeping of the memory tier beside that of vLLM's own CPU tier, with each of its policies."""

from __future__ import annotations

import hashlib
from statistics import median
from typing import Any

from benchmarks.common.figures import Figure
from benchmarks.common.processes import in_child
from benchmarks.common.timing import alternately

__all__ = ["measure"]

#: Blocks of one request.
_BATCH = 128
_PAIRS = (("lru", "lru"), ("s3fifo", "arc"))


def measure(*, quick: bool = False) -> list[Figure]:
    """Measure lookup and eviction in both, in turns: our LRU beside vLLM's, our S3-FIFO beside vLLM's ARC.

    Both do what a request costs: a lookup asks for each block, holds all of them for a load and lets them go; an
    eviction stores as many new blocks in a full tier. Times are per block.
    """
    entries, repeats = (5_000, 3) if quick else (100_000, 201)
    results = {pair: in_child(_measure, *pair, entries, repeats) for pair in _PAIRS}
    return [
        Figure(
            f"vs_vllm_{name}",
            min(theirs[position] / ours[position] for ours, theirs in results.values()),
            detail="; ".join(
                f"{mine} {ours[position]:.3g} us, vLLM's {other} {theirs[position]:.3g} us"
                for (mine, other), (ours, theirs) in results.items()
            )
            + f"; {entries:,} blocks, as many times faster",
        )
        for position, name in enumerate(("lookup", "evict"))
    ]


def _measure(policy: str, their_policy: str, entries: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return microseconds per block of lookups and evictions: ours, and theirs."""
    ours = _Ours(policy, entries)
    theirs = _Theirs(their_policy, entries)
    sides: tuple[_Ours, _Theirs] = ours, theirs
    for first in range(0, entries, _BATCH):
        for side in sides:
            side.store(side.keys(first, min(first + _BATCH, entries)))
    present = [side.keys(entries - _BATCH, entries) for side in sides]
    our_lookups, their_lookups = alternately(
        [lambda: ours.look_up(present[0]), lambda: theirs.look_up(present[1])], repeats
    )
    new = [
        iter([side.keys(first, first + _BATCH) for first in range(entries, entries + repeats * _BATCH, _BATCH)])
        for side in sides
    ]
    our_evictions, their_evictions = alternately(
        [lambda: ours.store(next(new[0])), lambda: theirs.store(next(new[1]))], repeats
    )
    scale = 1e6 / _BATCH
    return (
        [median(our_lookups) * scale, median(our_evictions) * scale],
        [median(their_lookups) * scale, median(their_evictions) * scale],
    )


class _Ours:
    """An allocator, as a connector uses it."""

    def __init__(self, policy: str, entries: int) -> None:
        from kvplug.store import Allocator, make_policy

        self._allocator = Allocator(entries, make_policy(policy, entries))

    def keys(self, first: int, stop: int) -> list[bytes]:
        return _keys(first, stop)

    def store(self, keys: list[bytes]) -> None:
        refs = [ref for ref in self._allocator.reserve(keys) if ref is not None]
        if len(refs) != len(keys):
            raise AssertionError("a block found no room")
        self._allocator.publish(refs)

    def look_up(self, keys: list[bytes]) -> None:
        if self._allocator.prefix_length(keys) != len(keys):
            raise AssertionError("a block isn't there")
        self._allocator.unpin(self._allocator.pin_prefix(keys))


class _Theirs:
    """vLLM's manager of its CPU tier, as its connector uses it: a request of its own for each batch."""

    def __init__(self, policy: str, entries: int) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._manager = CPUOffloadingManager(entries, cache_policy=policy)
        self._context: Any = ReqContext
        self._hit = LookupResult.HIT
        self._key = make_offload_key
        self._turn = 0

    def keys(self, first: int, stop: int) -> list[bytes]:
        return [self._key(key, 0) for key in _keys(first, stop)]

    def store(self, keys: list[bytes]) -> None:
        context = self._request()
        output = self._manager.prepare_store(keys, context)
        if output is None or len(output.keys_to_store) != len(keys):
            raise AssertionError("a block found no room")
        self._manager.complete_store(keys, context)
        self._manager.on_request_finished(context)

    def look_up(self, keys: list[bytes]) -> None:
        context = self._request()
        for key in keys:
            if self._manager.lookup(key, context) is not self._hit:
                raise AssertionError("a block isn't there")
        self._manager.prepare_load(keys, context)
        self._manager.complete_load(keys, context)
        self._manager.on_request_finished(context)

    def _request(self) -> Any:
        self._turn += 1
        context = self._context(req_id=str(self._turn))
        self._manager.on_new_request(context)
        return context


def _keys(first: int, stop: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in range(first, stop)]
