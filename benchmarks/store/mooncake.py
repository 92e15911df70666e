"""The tier `mooncake` beside the batch calls of Mooncake's own client, on one store on the loopback interface."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.figures import Figure

__all__ = ["measure"]

_ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20
_SIZES = (1 * _MIB, 4 * _MIB)
#: Bytes of one call: as many values as fit.
_CALL_BYTES = 32 * _MIB
_TIMEOUT = 10.0


def measure(*, quick: bool = False) -> list[Figure]:
    """Return how fast the tier reads and writes, as parts of what a plain program reaches; the lowest over the sizes.

    Master, storage node and client are processes of their own. Both clients move the same values in the same batches,
    in turns, from and to registered memory; seconds are those on the wall, since Mooncake's threads do the work.

    Raises:
        RuntimeError: Mooncake isn't there, or returned something else than was put.

    """
    sys.path += [folder for folder in (str(_ROOT / "tests"), str(_ROOT / "scripts")) if folder not in sys.path]
    from support import mooncake

    missing = mooncake.missing()
    if missing:
        raise RuntimeError(missing)
    mooncake.preload()
    runs = 3 if quick else 41
    with mooncake.mooncake_store(1024 * _MIB) as store:
        results = {size: _measure_size(store, size, runs) for size in _SIZES}
    return [
        Figure(
            f"mooncake_{name}_vs_raw",
            min(result[name][0] for result in results.values()),
            at_least=0.9,
            detail="; ".join(f"{size // _MIB} MiB: {result[name][1]}" for size, result in results.items()),
        )
        for name in ("get", "put")
    ]


def _measure_size(store: Any, size: int, runs: int) -> dict[str, tuple[float, str]]:
    """Return for `get` and `put` the ratio to the raw client, and the figures that it consists of."""
    from kvplug.store.l2.mooncake import MooncakeTier

    count = _CALL_BYTES // size
    source, target = bytearray(os.urandom(_CALL_BYTES)), bytearray(_CALL_BYTES)
    tier = MooncakeTier(MooncakeTier.Settings(mooncake_master=store.address))
    raw = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    tier.open(max_value_bytes=size, timeout=_TIMEOUT)
    try:
        if raw.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", store.address) != 0:
            raise RuntimeError("Mooncake's client can't be set up")
        for memory in (source, target):
            tier.register(memoryview(memory))
            raw.register_buffer(_address(memory), _CALL_BYTES)
        starts = range(0, _CALL_BYTES, size)
        values, buffers = ([memoryview(memory)[i : i + size] for i in starts] for memory in (source, target))
        sources, targets = ([_address(memory) + i for i in starts] for memory in (source, target))
        fresh = itertools.count()

        def new_keys() -> list[bytes]:
            return [next(fresh).to_bytes(48, "big") for _ in range(count)]

        def tier_put(keys: list[bytes]) -> bool:
            return all(tier.put(keys, values, _TIMEOUT))

        def raw_put(keys: list[bytes]) -> bool:
            return not any(raw.batch_put_from([key.hex() for key in keys], sources, [size] * count))

        def tier_get(keys: list[bytes]) -> bool:
            return list(tier.get(keys, buffers, _TIMEOUT)) == [size] * count

        def raw_get(keys: list[bytes]) -> bool:
            return list(raw.batch_get_into([key.hex() for key in keys], targets, [size] * count)) == [size] * count

        put_times = _alternately([tier_put, raw_put], [new_keys, new_keys], runs, before=store.clear)
        store.clear()
        there = new_keys()
        if not (tier_put(there) and raw_put(there) and tier_get(there)) or source != target:
            raise RuntimeError("Mooncake didn't return what was put")
        get_times = _alternately([tier_get, raw_get], [lambda: there, lambda: there], runs)
    finally:
        tier.close()
        raw.close()
    return {"get": _compare(*get_times), "put": _compare(*put_times)}


def _alternately(
    functions: Sequence[Callable[[list[bytes]], bool]],
    keys: Sequence[Callable[[], list[bytes]]],
    runs: int,
    before: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Return the seconds of each function's runs; they take turns, and the one that begins changes."""
    times: list[list[float]] = [[] for _ in functions]
    order = list(range(len(functions)))
    for run in range(runs + 1):
        before()
        for index in order:
            arguments = keys[index]()
            start = time.perf_counter()
            done = functions[index](arguments)
            seconds = time.perf_counter() - start
            if not done:
                raise RuntimeError("Mooncake didn't move all values")
            if run:  # the first one connects
                times[index].append(seconds)
        order.reverse()
    return times


def _compare(ours: list[float], theirs: list[float]) -> tuple[float, str]:
    speeds = [_CALL_BYTES / median(times) / 1e9 for times in (ours, theirs)]
    return speeds[0] / speeds[1], f"{speeds[0]:.2f} of {speeds[1]:.2f} GB/s"


def _address(memory: bytearray) -> int:
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)
