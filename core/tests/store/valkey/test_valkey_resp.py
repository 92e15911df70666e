"""The protocol's reader, whatever the packets are."""

from __future__ import annotations

import pytest

from kvplug.store.l2.valkey.resp import ErrorReply, ProtocolError, Reader, encode


def _reader(data, piece=1 << 20):
    rest = memoryview(data)

    def receive(target):
        nonlocal rest
        assert len(target), "asked for nothing"
        count = min(piece, len(target), len(rest))
        assert count, "asked for more than is due"
        target[:count] = rest[:count]
        rest = rest[count:]
        return count

    return Reader(receive)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 4095, 4096, 4097, 1 << 20])
def test_replies_are_read_however_they_arrive(piece):
    """Replies of all kinds, in pieces of any length, are read in order; values land in their buffers."""
    value = bytes(range(256)) * 40
    data = (
        b"+OK\r\n:42\r\n$-1\r\n-OOM no room\r\n"
        + b"$%d\r\n%b\r\n" % (len(value), value)
        + b"$0\r\n\r\n*2\r\n*-1\r\n*2\r\n:1\r\n$3\r\na\r\n\r\n"
        + b"$%d\r\n%b\r\n" % (len(value), value)
        + b":-7\r\n"
    )
    reader = _reader(data, piece)
    assert reader.reply() == b"OK"
    assert reader.reply() == 42
    assert reader.reply() is None
    error = reader.reply()
    assert isinstance(error, ErrorReply)
    assert (error.code, error.text) == ("OOM", "OOM no room")
    buffer = bytearray(len(value) + 10)
    assert reader.reply(memoryview(buffer)) == len(value)
    assert buffer == value + bytes(10)
    assert reader.reply(memoryview(buffer)) == 0
    assert reader.reply() == [None, [1, b"a\r\n"]]
    assert reader.reply() == value
    assert reader.reply() == -7


@pytest.mark.parametrize("piece", [1, 4096, 1 << 20])
@pytest.mark.parametrize("room", [0, 1, 5000, 9999])
def test_a_value_that_does_not_fit_is_skipped(piece, room):
    """A value longer than its buffer is None, and the next reply is the next one."""
    reader = _reader(b"$10000\r\n" + b"x" * 10000 + b"\r\n:1\r\n", piece)
    memory = bytearray(room + 8)
    assert reader.reply(memoryview(memory)[:room]) is None
    assert memory[room:] == bytes(8)
    assert reader.reply() == 1


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x15\x03\x03\x00\x02\x02\x50\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$999999999999\r\n",
        b"*99999999\r\n",
        b"*1\r\n" * 100,
        b":1e3\r\n",
        b"\r\n",
        b"$2\r\nabc\r\n",
        b"+" + b"x" * 5000,
    ],
)
def test_what_is_no_reply_is_an_error(data):
    """Something else than the protocol is an error, and no wait for gigabytes."""
    with pytest.raises(ProtocolError):
        _reader(data).reply()


def test_an_error_reply_cannot_forge_lines():
    """An error reply is shown in printable characters, and not at any length."""
    reply = _reader(b"-ERR \x1b[31m \xff\nINFO fine " + b"x" * 500 + b"\r\n").reply()
    assert isinstance(reply, ErrorReply)
    assert str(reply).isprintable()
    assert len(str(reply)) == 120


def test_commands_are_encoded():
    """A command is an array of strings, whatever is in them."""
    assert encode(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
