"""What the tier asks of a server: how often, over how many connections, in how many packets."""

from __future__ import annotations

import re
import socket

import pytest

from kvplug.store.l2.tier import TierError, TierTimeoutError

T = 5.0


def _answer(data, replies=None):
    """Answer each command of a packet, as a server that is no cluster and has nothing."""
    replies = replies or {}
    names = re.findall(rb"\*\d+\r\n\$\d+\r\n([A-Z]+)\r\n", data)
    known = {
        b"CLUSTER": b"-ERR This instance has cluster support disabled\r\n",
        b"GET": b"$-1\r\n",
        b"EXISTS": b":0\r\n",
    }
    known |= {b"INFO": b"$0\r\n\r\n", b"DBSIZE": b":0\r\n"}
    return b"".join(replies.get(name, known.get(name, b"+OK\r\n")) for name in names)


def test_i7_a_connection_that_died_idle_is_replaced_once(scripted, make_tier):
    """After the peer has ended idle connections the next call makes one new one, logs in again, and works."""
    server = scripted(_answer)
    tier = make_tier(f"valkey://me:hunter2@127.0.0.1:{server.port}/3")
    assert tier.exists([b"a"], T) == [False]
    assert len(server.received) == 1
    server.end_connections()
    assert tier.exists([b"a"], T) == [False]
    assert len(server.received) == 2
    login = b"*3\r\n$4\r\nAUTH\r\n$2\r\nme\r\n$7\r\nhunter2\r\n*2\r\n$6\r\nSELECT\r\n$1\r\n3\r\n"
    for connection in server.received:
        assert connection[0].startswith(login)


@pytest.mark.parametrize("operation", ["exists", "get", "put", "delete"])
def test_i7_a_connection_that_dies_when_it_is_used_is_replaced_once(scripted, make_tier, operation):
    """A peer that has forgotten the connection, and says so when it is used, costs one more connection, no error."""
    forgotten = []

    def answer(data):
        if b"PING" not in data and forgotten:
            forgotten.clear()
            return None
        return _answer(data)

    server = scripted(answer)
    tier = make_tier(server.port)
    forgotten.append(True)
    buffer = memoryview(bytearray(100))
    call = {
        "exists": lambda: tier.exists([b"a"], T) == [False],
        "get": lambda: tier.get([b"a"], [buffer], T) == [None],
        "put": lambda: tier.put([b"a"], [buffer], T) == [True],
        "delete": lambda: tier.delete([b"a"], T) is None,
    }[operation]
    assert call()
    assert len(server.received) == 2


def test_i7_a_server_that_drops_each_connection_is_an_error(scripted, make_tier):
    """There is one reconnect and no more: a server that never answers isn't asked again and again."""
    dropping = []
    server = scripted(lambda data: None if dropping and b"PING" not in data else _answer(data))
    tier = make_tier(server.port)
    dropping.append(True)
    for expected in (2, 3, 4):
        with pytest.raises(TierError, match=f"127.0.0.1:{server.port}: the server ended the connection"):
            tier.exists([b"a"], T)
        assert len(server.received) == expected
    dropping.clear()
    assert tier.exists([b"a"], T) == [False]


def test_a_connection_lost_after_the_first_reply_is_not_tried_again(scripted, make_tier):
    """What was answered in part fails: the server was there, and lost the call."""
    server = scripted(lambda data: [b":0\r\n"] if b"EXISTS" in data else _answer(data))
    tier = make_tier(server.port)
    with pytest.raises(TierTimeoutError, match="didn't answer in time"):
        tier.exists([b"a", b"b"], 0.1)
    assert len(server.received) == 1


def test_a_call_that_ran_out_of_time_leaves_no_replies_behind(scripted, make_tier):
    """A late reply can't be taken for that of the next call: its connection is gone."""
    late = []
    server = scripted(lambda data: b"" if late and b"PING" not in data else _answer(data))
    tier = make_tier(server.port)
    late.append(True)
    with pytest.raises(TierTimeoutError):
        tier.exists([b"a"], 0.1)
    late.clear()
    assert tier.exists([b"a"], T) == [False]
    assert len(server.received) == 2


def test_a_reply_too_many_ends_the_connection(scripted, make_tier):
    """A server that says something unasked is out of step; its connection isn't used again."""
    server = scripted(lambda data: b":0\r\n:1\r\n" if b"EXISTS" in data else _answer(data))
    tier = make_tier(server.port)
    assert tier.exists([b"a"], T) == [False]
    # Not the second reply to the first call.
    assert tier.exists([b"a"], T) == [False]


def test_a_batch_is_one_round_trip(scripted, make_tier):
    """All keys of a batch are asked for at once, over one connection, and one packet if they fit in it."""
    server = scripted(_answer)
    tier = make_tier(server.port)
    seen = len(server.received[0])
    keys = [b"%048d" % number for number in range(128)]
    assert tier.exists(keys, T) == [False] * 128
    assert len(server.received) == 1
    assert b"".join(server.received[0][seen:]).count(b"EXISTS") == 128
    assert len(server.received[0]) <= seen + 2


def test_a_server_need_not_hold_more_than_a_window_of_replies(scripted, make_tier):
    """Of large values only some are asked for before the first has been read."""
    server = scripted(lambda data: b"" if b"GET" in data else _answer(data))
    tier = make_tier(server.port)
    buffers = [memoryview(bytearray(4 << 20))] * 32
    with pytest.raises(TierTimeoutError):
        tier.get([b"%d" % number for number in range(32)], buffers, 0.2)
    assert b"".join(server.received[0]).count(b"GET") == 8


def test_threads_have_connections_of_their_own_which_are_kept(scripted, make_tier):
    """A call takes a connection that lies idle; only calls at the same time make more."""
    server = scripted(_answer)
    tier = make_tier(server.port)
    for _ in range(20):
        tier.exists([b"a"], T)
    assert len(server.received) == 1


def test_connections_are_kept_alive(scripted, make_tier, monkeypatch):
    """The kernel asks idle peers whether they are there, and small packets aren't held back."""
    sockets = []
    original = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, where: (sockets.append(self), original(self, where))[1])
    make_tier(scripted(_answer).port)
    (connection,) = sockets
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_closing_while_a_connection_is_being_made_ends_the_call(scripted, make_tier, monkeypatch):
    """The tier is closed between a socket's making and its connection, which goes through, to a server that is mute."""
    silent = scripted(lambda data: _answer(data) if opening else b"")
    opening = True
    tier = make_tier(silent.port)
    opening = False
    original = socket.socket.connect

    def connect(self, where):
        tier.close()
        original(self, where)

    tier._topology.masters[0].drop_idle()
    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(TierError, match="closed while it was in use"):
        tier.exists([b"a"], 30.0)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"-LOADING the dataset is being loaded\r\n", "LOADING the dataset"),
        (b"-READONLY You can't write\r\n", "READONLY"),
        (b"-MISCONF no snapshots\r\n", "MISCONF"),
        (b"-NOPERM no permission\r\n", "NOPERM"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no Valkey or Redis server sends; check the port"),
    ],
)
def test_an_answer_that_is_a_refusal_is_an_error_with_the_place(scripted, make_tier, reply, message):
    """Whatever else a server answers is an error that names host and port, and the next call is a fresh start."""
    refusing = []
    server = scripted(lambda data: reply if refusing and b"PING" not in data else _answer(data))
    tier = make_tier(server.port)
    refusing.append(True)
    with pytest.raises(TierError, match=message) as caught:
        tier.put([b"a"], [memoryview(b"x")], T)
    assert f"127.0.0.1:{server.port}" in str(caught.value)
    refusing.clear()
    assert tier.put([b"a"], [memoryview(b"x")], T) == [True]
    assert len(server.received) == 2


def test_a_full_server_keeps_nothing_and_is_no_error(scripted, make_tier):
    """OOM is False for its key; the others are kept, over the same connection."""
    turns = iter([b"+OK\r\n", b"-OOM command not allowed\r\n", b"+OK\r\n"])
    server = scripted(
        lambda data: (
            b"".join(next(turns) for _ in range(data.count(b"SET\r\n"))) if b"SET\r\n" in data else _answer(data)
        )
    )
    tier = make_tier(server.port)
    assert tier.put([b"a", b"b", b"c"], [memoryview(b"x")] * 3, T) == [True, False, True]
    assert len(server.received) == 1


def test_a_value_is_too_long_for_any_server(make_tier):
    """Values longer than the servers take are refused when the tier is opened, not put by put."""
    tier = make_tier(1, opened=False)
    with pytest.raises(TierError, match="longer than the 536870912 bytes"):
        tier.open(max_value_bytes=(512 << 20) + 1, timeout=T)


def test_calls_before_open_are_errors(make_tier):
    """A tier that isn't open says so, with its place."""
    tier = make_tier(6379, opened=False)
    with pytest.raises(TierError, match=r"127\.0\.0\.1:6379: the tier isn't open"):
        tier.exists([b"a"], T)


def test_i16_a_server_that_is_not_there_is_named(make_tier):
    """`open` fails at once, with host and port and without the password, and works later."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and doesn't listen
        port = reserved.getsockname()[1]
        tier = make_tier(f"valkey://:hunter2@127.0.0.1:{port}", opened=False)
        for _ in range(2):
            with pytest.raises(TierError, match=f"127.0.0.1:{port}: can't connect: Connection refused") as caught:
                tier.open(max_value_bytes=100, timeout=T)
            assert "hunter2" not in str(caught.value)
        with pytest.raises(TierError, match="can't connect"):
            make_tier("valkey://no-such-host.invalid")
        with pytest.raises(TierError, match="can't connect: the host's name is impossible"):
            make_tier(f"valkey://{'x' * 100}.invalid")


def test_another_seed_is_asked_when_one_is_down(scripted, make_tier):
    """The hosts of the URL are tried one after the other."""
    server = scripted(_answer)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        tier = make_tier(f"valkey://127.0.0.1:{reserved.getsockname()[1]},127.0.0.1:{server.port}")
        assert tier.exists([b"a"], T) == [False]
