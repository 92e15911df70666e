"""Commands to one server and their replies, pipelined: all are under way before the first is answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvplug.store.l2.tier import TierError
from kvplug.store.l2.valkey.connection import Connection, LostError
from kvplug.store.l2.valkey.deadline import Deadline
from kvplug.store.l2.valkey.node import Node
from kvplug.store.l2.valkey.resp import Payload, Reply

__all__ = ["Command", "Exchange", "exchange_at_once"]


class Command(NamedTuple):
    """A command as it is sent, and where its reply goes."""

    pieces: tuple[Payload, ...]
    #: The key, as the server knows it: it says which node of a cluster is asked.
    key: bytes = b""
    into: memoryview | None = None


class Exchange:
    """One batch to one node: `start` sends it, `finish` reads the replies, `abandon` must follow in any case.

    A connection that lay idle may have died without telling: if it turns out so before anything was answered, the
    commands are sent once more over a new one. All of this tier's commands may be repeated. Nothing else is.

    Args:
        node: Whom to ask.
        commands: What to ask.
        window: Most commands that are under way at once, so that a server needn't hold all of the replies.

    """

    def __init__(self, node: Node, commands: Sequence[Command], window: int) -> None:
        self.node = node
        self._commands = commands
        self._window = window
        self._deadline = Deadline(0)
        self._connection: Connection | None = None
        self._sent = 0
        self._replies: list[Reply] = []

    def start(self, deadline: Deadline) -> None:
        """Send what fits in the window.

        Raises:
            TierError: It didn't work.

        """
        self._deadline = deadline
        self._connection = self.node.acquire(self._deadline)
        try:
            self._send()
        except LostError as error:
            self._reconnect(error)

    def fileno(self) -> int:
        """Return the descriptor that the first reply comes by, once started."""
        assert self._connection is not None
        return self._connection.fileno()

    def finish(self, deadline: Deadline) -> list[Reply]:
        """Return the replies, in order.

        Raises:
            TierError: Not all of them came.

        """
        assert self._connection is not None
        self._deadline = self._connection.deadline = deadline
        for command in self._commands:
            self._replies.append(self._reply(command))
            if self._sent < len(self._commands):
                self._send()
        self.node.release(self._connection)
        self._connection = None
        return self._replies

    def abandon(self) -> None:
        """Drop the connection unless the exchange is complete: what comes over it next belongs to nobody."""
        if self._connection is not None:
            self.node.discard(self._connection)
            self._connection = None

    def _reply(self, command: Command) -> Reply:
        assert self._connection is not None
        try:
            return self._connection.reply(command.into)
        except LostError as error:
            self._reconnect(error)
            return self._connection.reply(command.into)

    def _send(self) -> None:
        assert self._connection is not None
        stop = len(self._replies) + self._window
        self._connection.send(_pieces(self._commands[self._sent : stop]), self._deadline)
        self._sent = min(stop, len(self._commands))

    def _reconnect(self, error: TierError) -> None:
        assert self._connection is not None
        if self._replies or not self._connection.reused:
            raise error
        self.abandon()
        self.node.drop_idle()  # they are as old, and as dead
        self._connection = self.node.dial(self._deadline)
        self._sent = 0
        self._send()


def exchange_at_once(node: Node, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
    """Send commands to a node and return the replies: an `Exchange` whose window has room for all, at half the cost.

    Raises:
        TierError: It didn't work.

    """
    pieces = _pieces(commands)
    connection = node.acquire(deadline)
    replies: list[Reply] = []
    try:
        try:
            connection.send(pieces, deadline)
            replies.append(connection.reply(commands[0].into))
        except LostError:
            if not connection.reused:
                raise
            node.discard(connection)
            node.drop_idle()  # they are as old, and as dead
            connection = node.dial(deadline)
            connection.send(pieces, deadline)
        for index in range(len(replies), len(commands)):
            replies.append(connection.reply(commands[index].into))  # noqa: PERF401 - kept if one fails
    except BaseException:
        # What comes over it next belongs to nobody.
        node.discard(connection)
        raise
    node.release(connection)
    return replies


def _pieces(commands: Iterable[Command]) -> list[Payload]:
    """Return what is sent; short pieces that follow each other are put together."""
    pieces: list[Payload] = []
    short: list[bytes] = []
    for command in commands:
        for piece in command.pieces:
            if isinstance(piece, bytes):
                short.append(piece)
            else:
                pieces += (b"".join(short), piece)
                short.clear()
    if short:
        pieces.append(b"".join(short))
    return pieces
