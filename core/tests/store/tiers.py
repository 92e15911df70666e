"""Tiers for tests: one that keeps values in a dict, and one that misbehaves when it is told to."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvplug.stats import Stats
from kvplug.store import Slab
from kvplug.store.l2.blocks import Blocks
from kvplug.store.l2.client import L2Client
from kvplug.store.l2.keys import StorageKeys
from kvplug.store.l2.tier import Tier, TierError, Usage
from kvplug.store.l2.value import layout_digest


class DictTier(Tier):
    """Keeps values in a dict that several tiers may share."""

    name = "dict"

    def __init__(self, values: dict[bytes, bytes] | None = None, *, capacity: int = 1 << 30) -> None:
        self.values: dict[bytes, bytes] = {} if values is None else values
        self.capacity = capacity
        self.calls: Counter[str] = Counter()
        #: Keys of each call, in order: (operation, keys).
        self.log: list[tuple[str, list[bytes]]] = []
        self.registered: list[int] = []
        self.opened = False

    @property
    def place(self) -> str:
        return "a dict"

    def _called(self, operation: str, keys: Sequence[bytes]) -> None:
        self.calls[operation] += 1
        self.log.append((operation, list(keys)))
        if not self.opened:
            raise TierError("a dict: the tier isn't open")

    def open(self, *, max_value_bytes: int, timeout: float) -> None:
        self.calls["open"] += 1
        self.opened = True

    def register(self, memory: memoryview) -> None:
        self.registered.append(memory.nbytes)

    def exists(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        self._called("exists", keys)
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], timeout: float) -> list[int | None]:
        self._called("get", keys)
        lengths: list[int | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self.values.get(key)
            if value is None or len(value) > len(buffer):
                lengths.append(None)
                continue
            buffer[: len(value)] = value
            lengths.append(len(value))
        return lengths

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], timeout: float) -> list[bool]:
        self._called("put", keys)
        kept = []
        for key, value in zip(keys, values, strict=True):
            fits = sum(map(len, list(self.values.values()))) + len(value) <= self.capacity
            if fits:
                self.values[key] = bytes(value)
            kept.append(fits)
        return kept

    def delete(self, keys: Sequence[bytes], timeout: float) -> None:
        self._called("delete", keys)
        for key in keys:
            self.values.pop(key, None)

    def usage(self, timeout: float) -> Usage:
        self._called("usage", [])
        values = list(self.values.values())
        return Usage(sum(map(len, values)), self.capacity, len(values))

    def close(self) -> None:
        self.calls["close"] += 1
        self.opened = False


class FaultyTier(DictTier):
    """Hangs, fails, or gives back something else than was put, when it is told to."""

    name = "faulty"

    def __init__(self, values: dict[bytes, bytes] | None = None, *, capacity: int = 1 << 30) -> None:
        super().__init__(values, capacity=capacity)
        #: Set: calls go on. Cleared: they wait, whatever their timeout.
        self.going = threading.Event()
        self.going.set()
        #: Raised by each call, if any.
        self.error: Exception | None = None
        #: Raised by `open`, if any.
        self.open_error: Exception | None = None
        #: Calls that wait for `going`.
        self.waiting = threading.Semaphore(0)

    def open(self, *, max_value_bytes: int, timeout: float) -> None:
        if self.open_error is not None:
            self.calls["open"] += 1
            raise self.open_error
        super().open(max_value_bytes=max_value_bytes, timeout=timeout)

    def _called(self, operation: str, keys: Sequence[bytes]) -> None:
        super()._called(operation, keys)
        if not self.going.is_set():
            self.waiting.release()
            self.going.wait(60)
        if self.error is not None:
            raise self.error


def make_client(tier: Tier, slab: Slab, stats: Stats | None = None, **settings: Any) -> L2Client:
    """Return a client of a tier for a slab, not started yet."""
    keys = settings.pop("keys", None) or StorageKeys("all")
    blocks = Blocks(slab, keys, layout_digest("all"), settings.pop("codec", None))
    return L2Client(tier, blocks, Stats() if stats is None else stats, **settings)


def fill(slab: Slab, slot: int, seed: int) -> bytes:
    """Write a block's bytes into a slot, and return them."""
    block = bytes((seed * 37 + index * 11) & 0xFF for index in range(slab.slot_bytes))
    slab.view(slot)[:] = np.frombuffer(block, np.uint8)
    return block


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does. Fails if it doesn't."""
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it didn't come to that")
