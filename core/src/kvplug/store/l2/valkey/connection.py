"""One connection to one server, logged in."""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress

from kvplug.store.l2.tier import TierError, TierTimeoutError
from kvplug.store.l2.valkey.deadline import Deadline
from kvplug.store.l2.valkey.resp import ErrorReply, Payload, ProtocolError, Reader, Reply, encode
from kvplug.store.l2.valkey.url import Address, Target

__all__ = ["Connection", "LostError"]

#: Most pieces that one system call sends (IOV_MAX).
_PIECES = 1024
#: Seconds until the kernel asks whether an idle peer is there, and between and number of questions. Load balancers
#: forget connections that are idle for minutes.
_KEEPALIVE = (60, 15, 4)
#: Seconds by which a system call may take longer than the call has left.
_TOLERANCE = 0.005


class LostError(TierError):
    """The other side ended the connection."""


class Connection:
    """A connection. One thread uses it at a time; any thread may call `interrupt`."""

    def __init__(self, address: Address, target: Target, tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._target = target
        self._tls = tls
        self._socket: socket.socket | None = None
        self._reader = Reader(self._receive)
        self._readable = select.poll()
        #: For sending and receiving.
        self.deadline = Deadline(0)
        self._interrupted = False
        # Seconds that the kernel was told: none yet.
        self._limited = math.inf
        #: Whether it has answered an earlier call: then it may have died since.
        self.reused = False

    # -- Begin and end -------------------------------------------------------------------------------------------

    def connect(self, deadline: Deadline) -> None:
        """Connect and log in.

        The time that the system takes to look a host's name up is not limited.

        Raises:
            TierError: It didn't work, or not in time.

        """
        self.deadline = deadline
        try:
            self._socket = self._dial()
            self._readable.register(self._socket, select.POLLIN)
            if self._tls is not None:
                self._socket.settimeout(self._left())
                self._socket = secure = self._tls.wrap_socket(
                    self._socket, server_hostname=self._address.host, do_handshake_on_connect=False
                )
                self._shake_hands(secure)
            else:
                self._socket.settimeout(None)
            self._log_in()
        except ssl.SSLError as error:
            self.close()
            reason = getattr(error, "verify_message", "") or error.reason or "no TLS"
            raise TierError(
                f"{self._address}: the TLS handshake failed ({reason}); check that the server speaks TLS on this port "
                "and that valkey_tls_ca has its certificate's issuer."
            ) from None
        except OSError as error:
            self.close()
            raise self._failed(error, "can't connect") from None
        except BaseException:
            self.close()
            raise

    def _dial(self) -> socket.socket:
        try:
            found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        except UnicodeError:  # what some impossible names end in
            raise OSError("the host's name is impossible") from None
        problem: OSError = OSError("the name has no address")
        for index, (family, kind, protocol, _, where) in enumerate(found):
            connection = socket.socket(family, kind, protocol)
            self._socket = connection  # where `interrupt` finds it
            try:
                # One address that swallows packets leaves time for the others.
                connection.settimeout(self._left() / (len(found) - index))
                connection.connect(where)
                _tune(connection)
            except OSError as error:
                connection.close()
                problem = error
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        raise problem

    def _shake_hands(self, secure: ssl.SSLSocket) -> None:
        try:
            secure.do_handshake()
        except TimeoutError:
            # What a server without TLS does: it waits for the rest of a command.
            raise TierTimeoutError(
                f"{self._address}: the TLS handshake wasn't answered in time; check that the server speaks TLS on this "
                "port."
            ) from None

    def _log_in(self) -> None:
        target, commands = self._target, []
        if target.password is not None:
            login = [item.encode() for item in (target.username, target.password) if item is not None]
            commands.append(encode(b"AUTH", *login))
        if target.database:
            commands.append(encode(b"SELECT", b"%d" % target.database))
        self.send([*commands, encode(b"PING")], self.deadline)
        for command in [*commands, b"PING"]:
            reply = self.reply()
            if not isinstance(reply, ErrorReply):
                continue
            if target.password is not None and command is commands[0]:
                # The code only: a server that knows no AUTH quotes what it was sent.
                raise TierError(
                    f"{self._address}: the server refuses the login ({reply.code}); correct the user and the password "
                    "in valkey_url."
                )
            if reply.code == "NOAUTH":
                raise TierError(f"{self._address}: the server wants a password; add it to valkey_url.")
            raise TierError(f"{self._address}: the server answers {self.shown(reply)!r}.")

    def interrupt(self) -> None:
        """Make whoever uses the connection fail at once."""
        self._interrupted = True
        if self._socket is not None:
            # Not SSLSocket's method, which would let a thread that is sending go on without TLS.
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back. Only whoever uses the connection may call it."""
        if self._socket is not None:
            self._socket.close()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return -1 if self._socket is None else self._socket.fileno()

    def alive(self) -> bool:
        """Whether, as far as this side knows, the connection can be used for another call."""
        # Between calls nothing is due: something to read is the connection's end, or it is out of step.
        if self._socket is None or self._interrupted or self._reader.pending:
            return False
        return not self._readable.poll(0)

    # -- Commands and replies ------------------------------------------------------------------------------------

    def send(self, pieces: Sequence[Payload], deadline: Deadline) -> None:
        """Send bytes, without putting them together first; the deadline also holds for the replies.

        Raises:
            LostError: The connection has ended.
            TierTimeoutError: The server didn't take them in time.

        """
        self.deadline = deadline
        connection = self._socket
        assert connection is not None
        rest, first = list(pieces), 0
        try:
            while first < len(rest):
                self._limit(connection)
                try:
                    if self._tls is None:
                        count = connection.sendmsg(rest[first : first + _PIECES])
                    else:
                        count = connection.send(rest[first])
                except BlockingIOError:
                    continue  # a time limit has passed; `_limit` knows whether it is the call's
                while first < len(rest) and count >= len(rest[first]):
                    count -= len(rest[first])
                    first += 1
                if count:
                    rest[first] = memoryview(rest[first])[count:]
        except OSError as error:
            raise self._failed(error, "the connection broke") from None

    def reply(self, into: memoryview | None = None) -> Reply:
        """Read a reply; see `Reader.reply`.

        Raises:
            LostError: The connection has ended.
            TierTimeoutError: It didn't come by the deadline of what was sent last.
            TierError: It is no reply.

        """
        try:
            return self._reader.reply(into)
        except ProtocolError as error:
            raise TierError(
                f"{self._address}: received {self.shown(error)}, which no Valkey or Redis server sends; check the "
                "port, and write valkeys:// if it wants TLS."
            ) from None

    def _receive(self, target: memoryview) -> int:
        connection = self._socket
        assert connection is not None
        while True:
            self._limit(connection)
            try:
                count = connection.recv_into(target)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._failed(error, "the connection broke") from None
            if count == 0:
                raise LostError(f"{self._address}: the server ended the connection.")
            return count

    def _limit(self, connection: socket.socket) -> None:
        """Let the next system call take as long as there is time left.

        The limit is the kernel's, of a blocking socket. Python's own makes the socket a non-blocking one: each call
        costs a poll, and returns what is there already, so that a value comes in smaller pieces. TLS needs Python's.
        """
        left = self._left()
        if self._tls is not None:
            connection.settimeout(left)
        elif abs(left - self._limited) > _TOLERANCE:
            seconds, rest = divmod(max(left, _TOLERANCE), 1)
            limit = struct.pack("@ll", int(seconds), int(rest * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._limited = left

    def shown(self, text: object) -> str:
        """Return text from the server without the password, should it be in there."""
        password = self._target.password
        return str(text) if not password else str(text).replace(password, "***")

    def _left(self) -> float:
        # A socket that wasn't connected yet when the interruption came knows nothing of it.
        if self._interrupted:
            raise LostError(f"{self._address}: the connection was closed while it was in use.")
        left = self.deadline.left()
        if not left:
            raise self._timed_out()
        return left

    def _timed_out(self) -> TierTimeoutError:
        return TierTimeoutError(f"{self._address}: the server didn't answer in time.")

    def _failed(self, error: OSError, what: str) -> TierError:
        if isinstance(error, TimeoutError) and not self._interrupted:
            return self._timed_out()
        reason = error.strerror or getattr(error, "reason", None) or str(error)
        return LostError(f"{self._address}: {what}: {reason}.")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    for option, value in zip(options, _KEEPALIVE, strict=True):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
