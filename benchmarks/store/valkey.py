"""The tier `valkey` beside a raw socket that reads into the buffer, with one server on the loopback interface."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.common.figures import Figure

__all__ = ["measure"]

_ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20
_SIZES = (1 * _MIB, 4 * _MIB)
#: Bytes of one run, and of a call with many values.
_RUN_BYTES = 32 * _MIB
#: New connections, of each side.
_CONNECTIONS = 5
_TIMEOUT = 10.0
_HOST = "127.0.0.1"

#: Moves values; returns whether all were moved.
_Function = Callable[[], bool]


def measure(*, quick: bool = False) -> list[Figure]:
    """Return how fast the tier reads and writes, as parts of what raw sockets reach; the lowest over the sizes.

    Both move the same values from and to the same memory, in turns, value by value and in batches of 32 MiB that are
    sent at once. Seconds are those on the wall: the server is half of it.

    Raises:
        FileNotFoundError: There is no server.
        RuntimeError: Something else was read than was written.

    """
    sys.path += [folder for folder in (str(_ROOT / "tests"), str(_ROOT / "scripts")) if folder not in sys.path]
    from support.valkey import Server, find_binary

    with tempfile.TemporaryDirectory() as folder:
        server = Server(find_binary("valkey"), Path(folder), maxmemory="4gb", maxmemory_policy="allkeys-lru")
        try:
            results = [_measure(server.port, size, 1 if quick else 9) for size in _SIZES]
        finally:
            server.kill()
    figures = []
    for name in ("get", "set"):
        ratios, details = zip(*(item for result in results for item in result[name]), strict=True)
        figures.append(Figure(f"valkey_{name}_vs_raw", min(ratios), at_least=0.9, detail="; ".join(details)))
    return figures


def _measure(port: int, size: int, runs: int) -> dict[str, list[tuple[float, str]]]:
    """Return for `get` and `set` the ratios to raw sockets, and what they consist of."""
    count = _RUN_BYTES // size
    memory = _Memory(size)
    results: dict[str, list[tuple[float, str]]] = {"get": [], "set": []}
    for batch in (1, count):
        times: dict[str, list[list[float]]] = {name: [[], []] for name in results}
        # How much the kernel hands over at a time depends on what a connection has seen: no two are equally fast.
        for _ in range(_CONNECTIONS):
            for name, both in _over_new_connections(port, memory, batch, runs).items():
                for side, more in enumerate(both):
                    times[name][side] += more
        what = f"{size // _MIB} MiB {'by itself' if batch == 1 else f'x {batch}'}"
        for name, both in times.items():
            results[name].append(_compare(what, both))
    return results


class _Memory:
    """Keys, the values that they have, and where these are read to."""

    def __init__(self, size: int) -> None:
        self.source, self.target = bytearray(os.urandom(_RUN_BYTES)), bytearray(_RUN_BYTES)
        self.values, self.buffers = (
            [memoryview(memory)[i : i + size] for i in range(0, _RUN_BYTES, size)]
            for memory in (self.source, self.target)
        )
        self.keys = [b"%048d" % number for number in range(len(self.values))]

    def check(self, get: _Function) -> None:
        """Raise unless `get` reads what was put."""
        self.target[:] = bytes(_RUN_BYTES)
        if not get() or self.source != self.target:
            raise RuntimeError("the server didn't return what was put")


def _over_new_connections(port: int, memory: _Memory, batch: int, runs: int) -> dict[str, list[list[float]]]:
    """Return for `get` and `set` the seconds of the tier's runs and of a raw socket's."""
    from pydantic import SecretStr

    from kvplug.store.l2.valkey import ValkeySettings, ValkeyTier

    keys, values, buffers = memory.keys, memory.values, memory.buffers
    parts = [slice(start, start + batch) for start in range(0, len(keys), batch)]
    tier = ValkeyTier(ValkeySettings(valkey_url=SecretStr(f"valkey://{_HOST}:{port}"), valkey_prefix=""))
    tier.open(max_value_bytes=len(values[0]), timeout=_TIMEOUT)
    try:
        with socket.create_connection((_HOST, port)) as raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def tier_set() -> bool:
                return all(all(tier.put(keys[part], values[part], _TIMEOUT)) for part in parts)

            def raw_set() -> bool:
                return all(_raw_set(raw, keys[part], values[part]) for part in parts)

            def tier_get() -> bool:
                return all(None not in tier.get(keys[part], buffers[part], _TIMEOUT) for part in parts)

            def raw_get() -> bool:
                return all(_raw_get(raw, keys[part], buffers[part]) for part in parts)

            set_times = _alternately([tier_set, raw_set], runs)
            for get in (tier_get, raw_get):
                memory.check(get)
            return {"set": set_times, "get": _alternately([tier_get, raw_get], runs)}
    finally:
        tier.close()


def _raw_set(connection: socket.socket, keys: Sequence[bytes], values: Sequence[memoryview]) -> bool:
    rest: list[memoryview] = []
    for key, value in zip(keys, values, strict=True):
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
        rest += [memoryview(head), value, memoryview(b"\r\n")]
    while rest:
        sent = connection.sendmsg(rest)
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if sent:
            rest[0] = rest[0][sent:]
    replies = b""
    while len(replies) < 5 * len(keys):
        replies += connection.recv(4096)
    return replies == b"+OK\r\n" * len(keys)


def _raw_get(connection: socket.socket, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> bool:
    connection.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys))
    for buffer in buffers:
        head = b""
        while b"\r\n" not in head:
            head += connection.recv(16)
        line, _, begin = head.partition(b"\r\n")
        if int(line[1:]) != len(buffer):
            return False
        buffer[: len(begin)] = begin
        done = len(begin)
        while done < len(buffer):
            done += connection.recv_into(buffer[done:])
        end = b""
        while len(end) < 2:
            end += connection.recv(2 - len(end))
    return True


def _alternately(functions: Sequence[_Function], runs: int) -> list[list[float]]:
    """Return the seconds of each function's runs; they take turns, and the one that begins changes."""
    times: list[list[float]] = [[] for _ in functions]
    order = list(range(len(functions)))
    for run in range(runs + 1):
        for index in order:
            start = time.perf_counter()
            done = functions[index]()
            seconds = time.perf_counter() - start
            if not done:
                raise RuntimeError("the server didn't move all values")
            if run:  # the first one connects, and touches memory
                times[index].append(seconds)
        order.reverse()
    return times


def _compare(what: str, times: Sequence[Sequence[float]]) -> tuple[float, str]:
    ours, theirs = (_RUN_BYTES / median(seconds) / 1e9 for seconds in times)
    return ours / theirs, f"{what}: {ours:.2f} of {theirs:.2f} GB/s"
