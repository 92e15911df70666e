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
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Proxy"]

HOST = "127.0.0.1"


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
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
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

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(10)

    def reset(self) -> None:
        """Reset all connections (RST, not FIN)."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for side in pair:
                self._reset(side)

    def _reset(self, side: socket.socket) -> None:
        with suppress(OSError):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with suppress(OSError):
            # Ends the threads that wait for it; closing alone doesn't.
            socket.socket.shutdown(side, socket.SHUT_RD)
        with suppress(OSError):
            side.close()

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
        with self._lock:
            self._pairs.append((client, server))
        self._spawn(self._requests, client, server)
        self._replies(client, server)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _replies(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        with suppress(OSError, ValueError):
            while data := server.recv(self.piece):
                if self.delay:
                    time.sleep(self.delay)
                if self.reset_after is not None and passed + len(data) > self.reset_after:
                    client.sendall(data[: self.reset_after - passed])
                    time.sleep(0.05)  # a reset overtakes what is under way
                    break
                client.sendall(data)
                passed += len(data)
        with self._lock:
            self._pairs = [pair for pair in self._pairs if pair[0] is not client]
        for side in (client, server):
            self._reset(side)
