"""One server: the connections to it, and whether it works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar

from kvplug.store.l2.tier import TierError
from kvplug.store.l2.valkey.connection import Connection
from kvplug.store.l2.valkey.deadline import Deadline
from kvplug.store.l2.valkey.url import Address

__all__ = ["Node"]


class Node:
    """One server. Its methods may be called from any thread.

    Args:
        address: Where it listens.
        connection: Makes a connection to it that isn't connected yet.

    """

    #: Seconds that a node which failed is left alone, at first and at most: it doubles in between.
    pauses: ClassVar[tuple[float, float]] = (1.0, 16.0)

    def __init__(self, address: Address, connection: Callable[[Address], Connection]) -> None:
        self.address = address
        self._connection = connection
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False
        self._pause = 0.0
        self._retry_at = 0.0
        #: What went wrong the last time; None if nothing did.
        self.problem: TierError | None = None

    def __str__(self) -> str:
        return str(self.address)

    # -- Connections ---------------------------------------------------------------------------------------------

    def acquire(self, deadline: Deadline) -> Connection:
        """Return a connection for one call: an idle one if there is one that lives, else a new one."""
        while True:
            with self._lock:
                self._check_open()
                if not self._idle:
                    break
                connection = self._idle.pop()
                self._busy.add(connection)
            if connection.alive():
                return connection
            self.discard(connection)
        return self.dial(deadline)

    def dial(self, deadline: Deadline) -> Connection:
        """Return a new connection."""
        connection = self._connection(self.address)
        with self._lock:
            self._check_open()
            self._busy.add(connection)
        try:
            connection.connect(deadline)
        except BaseException:
            self.discard(connection)
            raise
        return connection

    def release(self, connection: Connection) -> None:
        """Take back a connection after a call that went well."""
        connection.reused = True
        with self._lock:
            self._busy.discard(connection)
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def discard(self, connection: Connection) -> None:
        """Close a connection of which nobody knows what comes next."""
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def drop_idle(self) -> None:
        """Close the connections that aren't in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self, *, interrupt: bool = True) -> None:
        """Close all connections: those in use at once, or when their calls end."""
        with self._lock:
            self._closed = True
            busy = list(self._busy) if interrupt else []
            for connection in busy:  # under the lock: none of them is closed meanwhile, and its descriptor another's
                connection.interrupt()
        self.drop_idle()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"{self}: the connections to this server are closed.")

    # -- Health --------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether to ask it: not for a while after it failed. Then one caller tries it, and the others wait on."""
        with self._lock:
            if self.problem is None:
                return True
            now = time.monotonic()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._pause
            return True

    def failed(self, problem: TierError) -> None:
        """Note that it failed."""
        first, longest = self.pauses
        with self._lock:
            self.problem = problem
            self._pause = min(max(self._pause * 2, first), longest)
            self._retry_at = time.monotonic() + self._pause
        self.drop_idle()

    def worked(self) -> None:
        """Note that it answered."""
        if self.problem is not None:
            with self._lock:
                self.problem, self._pause = None, 0.0
