"""A real server that is killed, stopped, slow, full, or used by others too."""

from __future__ import annotations

import gc
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvplug.store.l2.tier import TierError, TierTimeoutError
from support.proxy import Proxy
from support.valkey import until

pytestmark = pytest.mark.server

T = 10.0
#: Of a call that mustn't wait: a test that does is killed.
LONG = 1000.0
MIB = 1 << 20


def value_of(seed, length=4096):
    return memoryview(bytearray(random.Random(seed).randbytes(length)))


def read(tier, keys, length=4096, timeout=T):
    buffers = [memoryview(bytearray(length)) for _ in keys]
    found = tier.get(keys, buffers, timeout)
    return [None if count is None else buffer[:count] for count, buffer in zip(found, buffers, strict=True)]


def test_a_server_that_is_killed_and_comes_back(server, make_tier):
    """While it is gone calls fail at once with its place; when it is back, empty, they work without further ado."""
    tier = make_tier(server.port)
    assert tier.put([b"a"], [value_of(1)], T) == [True]
    server.kill()
    for _ in range(3):
        with pytest.raises(TierError, match=f"127.0.0.1:{server.port}: "):
            tier.exists([b"a"], LONG)
        with pytest.raises(TierError, match=f"127.0.0.1:{server.port}: can't connect: Connection refused"):
            read(tier, [b"a"], timeout=LONG)
        with pytest.raises(TierError, match="can't connect"):
            tier.put([b"a"], [value_of(1)], LONG)
        with pytest.raises(TierError, match="can't connect"):
            tier.usage(LONG)
    server.start()
    assert read(tier, [b"a"]) == [None]
    assert tier.put([b"a"], [value_of(2)], T) == [True]
    assert read(tier, [b"a"]) == [value_of(2)]


def test_a_restart_between_calls_is_not_noticed(server, make_tier):
    """Idle connections of before the restart are replaced, whatever their number."""
    tier = make_tier(server.port)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: tier.exists([b"a"], T), range(50)))
    server.restart()
    for _ in range(5):
        assert tier.put([b"a"], [value_of(1)], T) == [True]


def test_a_server_that_hangs_costs_the_deadline_once(server, proxy, make_tier):
    """A stopped server is a timeout for each call, after one try; nothing is repeated behind the caller's back."""
    tier = make_tier(proxy.port)
    server.pause()
    calls = [
        lambda: tier.exists([b"a"], 0.2),
        lambda: read(tier, [b"a"], timeout=0.2),
        lambda: tier.delete([b"a"], 0.2),
        lambda: tier.usage(0.2),
        # More than the buffers on the way hold: it is sending that hangs.
        lambda: tier.put([b"a"] * 4, [value_of(1, 8 * MIB)] * 4, 0.2),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(TierTimeoutError, match=f"127.0.0.1:{proxy.port}: the server didn't answer in time"):
            call()
        assert proxy.accepted == number + 1  # the first has the connection of `open`
    server.resume()
    assert tier.put([b"b"], [value_of(2)], T) == [True]
    assert read(tier, [b"b"]) == [value_of(2)]


def test_a_server_that_hangs_at_start(server, proxy, make_tier):
    """`open` ends by its timeout, can be repeated, and leaves nothing behind."""
    tier = make_tier(proxy.port, opened=False)
    before = _descriptors()
    server.pause()
    for _ in range(3):
        with pytest.raises(TierTimeoutError, match=f"127.0.0.1:{proxy.port}"):
            tier.open(max_value_bytes=MIB, timeout=0.1)
    server.resume()
    proxy.reset()
    until(lambda: _descriptors() == before)
    tier.open(max_value_bytes=MIB, timeout=T)
    assert tier.exists([b"a"], T) == [False]


def test_a_slow_server_is_waited_for_within_the_deadline(server, proxy, make_tier):
    """Replies that come late but in time are used, in whatever pieces; those that come too late are a timeout."""
    tier = make_tier(proxy.port)
    values = {b"%d" % number: value_of(number, 50_000) for number in range(4)}
    assert all(tier.put(list(values), list(values.values()), T))
    proxy.delay, proxy.piece = 0.02, 9973
    assert read(tier, [*values, b"x"], 50_000) == [*values.values(), None]
    proxy.delay = 0.2
    for _ in range(2):
        with pytest.raises(TierTimeoutError):
            read(tier, list(values), 50_000, timeout=0.3)
    proxy.delay = 0.0
    assert read(tier, [*values, b"x"], 50_000) == [*values.values(), None]


def test_i7_connections_reset_between_calls(server, proxy, make_tier):
    """Each reset costs one new connection, and no call."""
    tier = make_tier(f"valkey://127.0.0.1:{proxy.port}/2")
    value = value_of(1, 3 * MIB)
    for turn in range(1, 6):
        assert tier.put([b"a"], [value], T) == [True]
        assert read(tier, [b"a"], len(value)) == [value]
        assert proxy.accepted == turn
        proxy.reset()


def test_a_connection_reset_within_a_value(server, proxy, make_tier):
    """A value that arrives in part is an error, never a value; the next call has it whole."""
    tier = make_tier(proxy.port)
    value = value_of(1, 100_000)
    assert tier.put([b"a", b"b"], [value, value], T) == [True, True]
    for after in (1, 8, 9, 50_000, 100_009, 100_010, 150_000):
        proxy.reset()
        proxy.reset_after = None
        assert tier.exists([b"a"], T) == [True]
        (connection,) = proxy.connections
        proxy.reset_after = connection.passed + after
        with pytest.raises(TierError, match=f"127.0.0.1:{proxy.port}: "):
            read(tier, [b"a", b"b"], len(value))
    proxy.reset_after = None
    assert read(tier, [b"a", b"b"], len(value)) == [value, value]


def test_a_full_server_keeps_no_more_and_goes_on(start_server, make_tier, caplog):
    """Without eviction a full server says False for what it has no room for, and serves the rest."""
    server = start_server(maxmemory="24mb", maxmemory_policy="noeviction")
    tier = make_tier(server.port)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "nothing makes room" in caplog.text
    keys = [b"%d" % number for number in range(40)]
    kept = [tier.put([key], [value_of(0, MIB)], T)[0] for key in keys]
    assert 5 < sum(kept) < 30
    assert kept == sorted(kept, reverse=True)
    assert tier.put(keys, [value_of(0, MIB)] * len(keys), T).count(False) > 5
    assert read(tier, keys[:2], MIB) == [value_of(0, MIB)] * 2
    usage = tier.usage(T)
    assert usage.capacity_bytes == 24 * MIB
    assert usage.used_bytes >= MIB * sum(kept)
    tier.delete(keys, T)
    until(lambda: tier.put([b"new"], [value_of(0, MIB)], T) == [True])
    assert len(caplog.records) == 1


def test_a_server_that_evicts_makes_room(start_server, make_tier, caplog):
    """With allkeys-lru all is kept at first, and the server stays within its memory; there is nothing to warn of."""
    server = start_server(maxmemory="24mb", maxmemory_policy="allkeys-lru")
    tier = make_tier(server.port)
    for number in range(60):
        assert tier.put([b"%d" % number], [value_of(0, MIB)], T) == [True]
    found = tier.exists([b"%d" % number for number in range(60)], T)
    assert 5 < sum(found) < 30
    assert not caplog.records


def test_values_have_a_ttl_if_wanted(server, make_tier, caplog):
    """With `valkey_ttl` each value gets it anew when it is put, and is a miss when it has passed."""
    tier = make_tier(server.port, valkey_ttl=1000)
    assert not caplog.records
    assert tier.put([b"a", b"b"], [value_of(1), value_of(2)], T) == [True, True]
    assert 0 < server.command("TTL", "kvplug:a") <= 1000
    server.command("PEXPIRE", "kvplug:a", "1")
    until(lambda: tier.exists([b"a", b"b"], T) == [False, True])
    server.command("EXPIRE", "kvplug:b", "10")
    assert tier.put([b"b"], [value_of(2)], T) == [True]
    assert server.command("TTL", "kvplug:b") > 10
    without = make_tier(server.port)
    without.put([b"c"], [value_of(3)], T)
    assert server.command("TTL", "kvplug:c") == -1


def test_keys_begin_with_the_prefix(server, make_tier):
    """Two prefixes on one server are two stores."""
    one, other = make_tier(server.port, valkey_prefix="one:"), make_tier(server.port, valkey_prefix="")
    one.put([b"a"], [value_of(1)], T)
    other.put([b"a"], [value_of(2)], T)
    assert sorted(server.command("KEYS", "*")) == [b"a", b"one:a"]
    assert (read(one, [b"a"]), read(other, [b"a"])) == ([value_of(1)], [value_of(2)])
    one.delete([b"a"], T)
    assert other.exists([b"a"], T) == [True]


def test_foreign_values_under_our_keys_are_misses(server, make_tier):
    """Another type, nothing, or far too much under a key is a miss; the keys beside it are read, and it can be put."""
    tier = make_tier(server.port)
    tier.put([b"0", b"9"], [value_of(0), value_of(9)], T)
    server.command("RPUSH", "kvplug:list", "x")
    server.command("HSET", "kvplug:hash", "x", "y")
    server.command("SET", "kvplug:empty", "")
    server.command("SETRANGE", "kvplug:huge", str(100 * MIB), "x")
    keys = [b"0", b"list", b"huge", b"hash", b"empty", b"huge", b"9"]
    assert read(tier, keys) == [value_of(0), None, None, None, b"", None, value_of(9)]
    assert tier.put([b"list", b"huge"], [value_of(1), value_of(2)], T) == [True, True]
    assert read(tier, [b"list", b"huge"]) == [value_of(1), value_of(2)]


def test_big_values(server, make_tier):
    """Values of many megabytes come back byte for byte, several in a batch."""
    tier = make_tier(server.port)
    values = [value_of(seed, 16 * MIB - seed) for seed in range(4)]
    keys = [b"%d" % number for number in range(4)]
    assert tier.put(keys, values, T) == [True] * 4
    assert read(tier, keys, 16 * MIB) == values


def test_closing_ends_calls_that_hang(server, make_tier):
    """Calls that wait for a stopped server end when the tier is closed, long before their timeout."""
    tier = make_tier(server.port)
    server.pause()
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(tier.exists, [b"a"], 300.0) for _ in range(2)]
        calls += [threads.submit(tier.put, [b"a"], [value_of(1, 32 * MIB)], 300.0) for _ in range(2)]
        # One of the connections is that of `open`.
        until(lambda: len(tier._topology.masters[0]._busy) == 4)
        tier.close()
        for call in calls:
            with pytest.raises(TierError):
                call.result(60)
    with pytest.raises(TierError, match="isn't open"):
        tier.exists([b"a"], T)


def test_nothing_grows_over_a_thousand_calls_with_faults(server, make_tier):
    """Descriptors, threads and the server's connections stay as they were, whatever went wrong in between."""
    with Proxy(server.port) as proxy:
        tier = make_tier(proxy.port)
        choices = random.Random(5)
        values = [value_of(seed, 200_000) for seed in range(5)]
        outcomes = {True: 0, False: 0}
        marks = []
        for number in range(1000):
            fault = choices.randrange(20)
            if fault == 0:
                proxy.reset()
            elif fault == 1:
                proxy.reset_after = choices.randrange(1, 300_000)
            elif fault == 2:
                proxy.delay = 0.02
            seed = choices.randrange(5)
            try:
                if number % 3:
                    found = read(tier, [b"%d" % seed], 200_000, timeout=0.5 if not proxy.delay else 0.01)
                    assert found in ([None], [values[seed]])
                else:
                    tier.put([b"%d" % seed], [values[seed]], 0.5 if not proxy.delay else 0.01)
                outcomes[True] += 1
            except TierError:
                outcomes[False] += 1
            proxy.reset_after, proxy.delay = None, 0.0
            if number in (100, 999):
                proxy.reset()
                tier.exists([b"a"], T)
                gc.collect()
                until(lambda: len(server.command("CLIENT", "LIST").splitlines()) == 2)
                until(lambda: len(proxy.connections) == 1)
                marks.append((_settled(), threading.active_count()))
        assert outcomes[True] > 700
        assert outcomes[False] > 20
        assert marks[0] == marks[1]


def _settled():
    """Count the descriptors once that doesn't change any more."""
    counts = [-1]
    until(lambda: counts.append(_descriptors()) or counts[-1] == counts[-2])
    return counts[-1]


def _descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
