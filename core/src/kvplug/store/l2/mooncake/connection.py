"""Mooncake's client, which must not be closed while somebody is inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from kvplug.store.l2.mooncake.codes import name_of
from kvplug.store.l2.tier import TierError

__all__ = ["Connection", "addresses_of"]


class Connection:
    """One client of a store: set up when made, and closed when it was told to *and* the last call has returned.

    Closing Mooncake's client under a call crashes the process. A call that waits for a storage node can't be ended
    either, so where one is under way, it closes the client itself when it returns, and keeps the memory until then.

    Args:
        library: `mooncake.store`.
        master: The master's `host:port`.
        host: This machine's address, as the storage nodes may reach it.
        protocol: `tcp` or `rdma`.
        devices: RDMA devices, separated by commas.

    Raises:
        TierError: The master didn't take the client in.

    """

    def __init__(self, library: ModuleType, *, master: str, host: str, protocol: str, devices: str) -> None:
        self._master = master
        #: Over RDMA, devices read and write registered memory alone.
        self._register_all = protocol == "rdma"
        self._idle = threading.Condition()
        self._calls = 0
        self._closing = False
        # Registered memory, by address and bytes: how many calls have it registered, None if it is until the end.
        self._registered: dict[tuple[int, int], int | None] = {}
        self._kept: list[memoryview] = []  # registered memory doesn't go before the client is closed
        self._store = library.MooncakeDistributedStore()
        # No metadata server; no memory of ours for others; no buffer of its own, since all calls bring theirs.
        code = self._store.setup(host, "P2PHANDSHAKE", 0, 0, protocol, devices, master)
        if code != 0:
            self._store.close()
            raise TierError(f"Mooncake's master at {master} didn't take this engine in, {name_of(code)}: see its log.")

    @contextmanager
    def call(self, memory: Sequence[memoryview] = ()) -> Iterator[Any]:
        """Give Mooncake's client for one call, which may use `memory`.

        Raises:
            TierError: The connection is closed, or the memory can't be registered.

        """
        with self._idle:
            if self._closing:
                raise TierError(f"The connection to Mooncake's master at {self._master} is closed.")
            self._calls += 1
        try:
            with self._lent(memory):
                yield self._store
        finally:
            with self._idle:
                self._calls -= 1
                last = self._calls == 0
                if last:
                    self._idle.notify_all()
                if last and self._closing:
                    self._finish()

    def register(self, memory: memoryview) -> None:
        """Register memory until the connection is closed.

        Raises:
            TierError: Mooncake refuses it.

        """
        with self.call() as store:
            (start,) = addresses_of([memory])
            self._register(store, (start, memory.nbytes))
            with self._idle:
                self._registered[start, memory.nbytes] = None
                self._kept.append(memory)

    def close(self, wait: float) -> None:
        """Let no more calls in, and close when those under way have returned.

        Args:
            wait: Seconds to wait for them. If they take longer, the last of them closes.

        """
        with self._idle:
            if self._closing:
                return
            self._closing = True
            if self._calls == 0:
                self._finish()
            else:
                self._idle.wait_for(lambda: self._calls == 0, wait)

    def _finish(self) -> None:
        self._store.close()
        self._registered.clear()
        self._kept.clear()

    @contextmanager
    def _lent(self, memory: Sequence[memoryview]) -> Iterator[None]:
        """Have memory registered during a call, if it needs to be and isn't."""
        lent: list[tuple[int, int]] = []
        try:
            if self._register_all:
                for start, view in zip(addresses_of(memory), memory, strict=True):
                    self._lend(start, view.nbytes, lent)
            yield
        finally:
            for piece in lent:
                self._give_back(piece)

    def _lend(self, start: int, nbytes: int, lent: list[tuple[int, int]]) -> None:
        with self._idle:
            for (first, length), calls in self._registered.items():
                if calls is None and first <= start and start + nbytes <= first + length:
                    return
            calls = self._registered.get((start, nbytes), 0)
            if not calls:
                self._register(self._store, (start, nbytes))
            self._registered[start, nbytes] = (calls or 0) + 1
        lent.append((start, nbytes))

    def _give_back(self, piece: tuple[int, int]) -> None:
        with self._idle:
            calls = self._registered[piece]
            if calls is not None and calls > 1:
                self._registered[piece] = calls - 1
            else:
                del self._registered[piece]
                self._store.unregister_buffer(piece[0])

    def _register(self, store: Any, piece: tuple[int, int]) -> None:
        start, nbytes = piece
        code = store.register_buffer(start, nbytes)
        if code != 0:
            raise TierError(
                f"Mooncake can't register {nbytes} bytes of host memory, {name_of(code)}: raise the limit of locked "
                "memory (ulimit -l)."
            )


def addresses_of(views: Sequence[memoryview]) -> list[int]:
    """Return where the views' memory begins. It is there as long as the views are."""
    return [int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if view.nbytes else 0 for view in views]
