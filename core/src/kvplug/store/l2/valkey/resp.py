"""The servers' protocol, RESP2: commands as bytes to send, replies read from a stream, values into given buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["ErrorReply", "Payload", "ProtocolError", "Reader", "Reply", "encode"]

Payload: TypeAlias = "bytes | memoryview"

#: Enough for any reply's first line. What follows it in the same packet is copied once more, so it isn't larger.
_BUFFER_BYTES = 4096
#: Of a reply that no buffer was given for, and elements of an array: more than a cluster of a thousand nodes says.
_MAX_BYTES = 16 << 20
_MAX_ELEMENTS = 1 << 16
_MAX_DEPTH = 8
_SHOWN = 120


class ProtocolError(Exception):
    """What was received is no reply."""


@dataclass(frozen=True)
class ErrorReply:
    """A reply that says what went wrong."""

    text: str

    @property
    def code(self) -> str:
        """Its first word, such as MOVED or OOM."""
        return self.text.partition(" ")[0]

    def __str__(self) -> str:
        return self.text[:_SHOWN]


Reply: TypeAlias = "int | bytes | list[Reply] | ErrorReply | None"


def encode(*arguments: bytes) -> bytes:
    """Return a command as it is sent."""
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%b\r\n" % (len(item), item) for item in arguments)


class Reader:
    """Reads replies.

    Args:
        receive: Receives at least one byte into a memory that isn't empty, and returns how many.

    """

    def __init__(self, receive: Callable[[memoryview], int]) -> None:
        self._receive = receive
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # What was received and not yet read is between the two.
        self._start = self._end = 0

    @property
    def pending(self) -> bool:
        """Whether something was received that is of no reply so far."""
        return self._end > self._start

    def reply(self, into: memoryview | None = None) -> Reply:
        """Read one reply.

        Args:
            into: Where a value goes. The reply is then its length in bytes, or None if it doesn't fit.

        Raises:
            ProtocolError: It is none. Nothing more can be read.

        """
        return self._reply(into, 0)

    def _reply(self, into: memoryview | None, depth: int) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            # In printable characters: it may quote a key, or be made to look like a line of a log.
            return ErrorReply(rest.decode("ascii", "backslashreplace").encode("unicode_escape").decode())
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            return self._bulk(_number(rest), into)
        if kind == b"*" and depth < _MAX_DEPTH:
            count = _number(rest)
            if not -1 <= count <= _MAX_ELEMENTS:
                raise ProtocolError(f"an array of {count} elements")
            return None if count < 0 else [self._reply(None, depth + 1) for _ in range(count)]
        raise ProtocolError(repr(line[:_SHOWN]))

    def _bulk(self, length: int, into: memoryview | None) -> Reply:
        if length == -1:
            return None
        result: Reply
        if length < 0 or (into is None and length > _MAX_BYTES):
            raise ProtocolError(f"a string of {length} bytes")
        if into is None:
            value = bytearray(length)
            self._read(memoryview(value))
            result = bytes(value)
        elif length <= len(into):
            self._read(into[:length])
            result = length
        else:
            self._skip(length, into)
            result = None
        if self._line():
            raise ProtocolError("a string that is longer than it says")
        return result

    def _line(self) -> bytes:
        while True:
            stop = self._buffer.find(b"\r\n", self._start, self._end)
            if stop >= 0:
                line = bytes(self._view[self._start : stop])
                self._start = stop + 2
                return line
            if self._end - self._start == _BUFFER_BYTES:
                raise ProtocolError(repr(bytes(self._view[:_SHOWN])))
            if self._start:
                rest = self._buffer[self._start : self._end]
                self._buffer[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            self._end += self._receive(self._view[self._end :])

    def _take(self, target: memoryview) -> int:
        """Move what was received already; return how many bytes that is."""
        count = min(len(target), self._end - self._start)
        target[:count] = self._view[self._start : self._start + count]
        self._start += count
        return count

    def _read(self, target: memoryview) -> None:
        done = self._take(target)
        while done < len(target):
            done += self._receive(target[done:])

    def _skip(self, length: int, scratch: memoryview) -> None:
        done = min(length, self._end - self._start)
        self._start += done
        if len(scratch) < _BUFFER_BYTES:
            scratch = self._view  # of which nothing is wanted if there is something left to skip
        while done < length:
            done += self._receive(scratch[: length - done])


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError(repr(text[:_SHOWN])) from None
