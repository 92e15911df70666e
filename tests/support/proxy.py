"""A proxy between a client and a server on the loopback interface that is slow, breaks connections, or speaks TLS."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Proxy"]

HOST = "127.0.0.1"


class _Connection:
    """A client's connection and the one to the server that it is passed on to."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        #: Bytes of replies so far.
        self.passed = 0

    def reset(self) -> None:
        """Reset both (RST, not FIN)."""
        for side in (self.client, self.server):
            with suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                # Ends the threads that wait for it; closing alone doesn't.
                socket.socket.shutdown(side, socket.SHUT_RD)
            with suppress(OSError):
                side.close()


class Proxy:
    """Passes bytes on between whoever connects and a server. Use it as a context manager.

    Args:
        target: The server's port.
        tls: Makes the client's side speak TLS.

    """

    def __init__(self, target: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = target
        self._tls = tls
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        #: Seconds that each piece of a reply is held back.
        self.delay = 0.0
        #: Most bytes of a piece of a reply.
        self.piece = 1 << 16
        #: Bytes of replies after which each connection is reset; None for never.
        self.reset_after: int | None = None
        #: Connections so far.
        self.accepted = 0
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(10)

    @property
    def connections(self) -> list[_Connection]:
        """Those that there are."""
        with self._lock:
            return list(self._connections)

    def reset(self) -> None:
        """Reset all connections."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.reset()

    def _spawn(self, function: object, *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection((HOST, self._target))
        except OSError:
            client.close()
            return
        connection = _Connection(client, server)
        with self._lock:
            self._connections.append(connection)
        self._spawn(self._requests, client, server)
        self._replies(connection)
        connection.reset()
        with self._lock:
            self._connections = [item for item in self._connections if item is not connection]

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _replies(self, connection: _Connection) -> None:
        with suppress(OSError, ValueError):
            while data := connection.server.recv(self.piece):
                if self.delay:
                    time.sleep(self.delay)
                left = None if self.reset_after is None else self.reset_after - connection.passed
                if left is not None and len(data) > left:
                    connection.client.sendall(data[: max(0, left)])
                    time.sleep(0.05)  # a reset overtakes what is under way
                    return
                connection.client.sendall(data)
                connection.passed += len(data)
