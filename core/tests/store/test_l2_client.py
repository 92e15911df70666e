"""The client of a tier: deadlines, slots that stay held, and a tier that fails is left alone."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from tiers import DictTier, FaultyTier, eventually, fill, make_client

from kvplug.stats import Stats
from kvplug.store import Slab
from kvplug.store.l2 import exchange, health
from kvplug.store.l2.breaker import Breaker
from kvplug.store.l2.keys import StorageKeys
from kvplug.store.l2.operation import Outcome
from kvplug.store.l2.tier import TierError, TierTimeoutError

BLOCK = 4096
KEYS = [bytes([number]) * 32 for number in range(16)]
#: Seconds; what takes longer in these tests never ends by itself.
SHORT = 0.05


@pytest.fixture(autouse=True)
def _warnings_come_again(monkeypatch):
    for module in (exchange, health):
        monkeypatch.setattr(module._limited, "_seen", {})


@pytest.fixture
def slab():
    return Slab(16, BLOCK, header_bytes=64)


@pytest.fixture
def stats():
    return Stats()


@pytest.fixture
def start(slab, stats):
    """Start a client of a tier; it is closed when the test ends."""
    clients = []

    def start(tier, **settings):
        clients.append(make_client(tier, slab, stats, **settings))
        clients[-1].start()
        return clients[-1]

    yield start
    for client in clients:
        if isinstance(client.tier, FaultyTier):
            client.tier.going.set()
        client.close()


class Holder:
    """Notes when an operation gives its memory back, and with what."""

    def __init__(self):
        self.released = []

    def __call__(self, result):
        self.released.append(result)


def never(**settings):
    """Return a breaker that doesn't open."""
    return Breaker(failures=1000, **settings)


def test_blocks_go_out_and_come_back(start, slab, stats):
    """Blocks are written from slots and read into others, each with its header; missing ones are misses."""
    tier = DictTier()
    client = start(tier)
    blocks = [fill(slab, slot, slot) for slot in range(3)]
    writing = client.put(KEYS[:3], [0, 1, 2])
    assert writing.wait()
    assert writing.result == [True] * 3
    looking = client.exists(KEYS[:4])
    assert looking.wait()
    assert looking.result == [True, True, True, False]
    reading = client.get([KEYS[2], KEYS[9], KEYS[0]], [5, 6, 7])
    assert reading.wait()
    assert reading.result == [True, False, True]
    assert slab.view(5).tobytes() == blocks[2]
    assert slab.view(7).tobytes() == blocks[0]
    assert stats.get("l2_blocks_written:dict") == 3
    assert stats.get("l2_written_bytes:dict") == 3 * (BLOCK + 64)
    assert stats.get("l2_blocks_read:dict") == 2
    assert stats.get("l2_lookups:dict") == 4
    assert stats.get("l2_hits:dict") == 3
    assert client.delete(KEYS[:1]).wait()
    assert len(tier.values) == 2
    usage = client.usage()
    assert usage.wait()
    assert usage.result.entries == 2


def test_the_whole_slab_is_registered_once(start, slab):
    """The tier is told of the slab's memory after it was opened."""
    tier = DictTier()
    start(tier)
    assert tier.registered == [slab.nbytes]


def test_a_rank_reads_only_its_own_part(slab, stats, start):
    """Keys say which part of a block a rank holds, how it's laid out, and which namespace: others find nothing."""
    tier = DictTier()
    mine = start(tier, keys=StorageKeys("tp0of2", "NHD"))
    fill(slab, 0, 1)
    assert mine.put(KEYS[:1], [0]).wait()
    assert {len(key) for key in tier.values} == {48}
    for keys in [
        StorageKeys("tp1of2", "NHD"),
        StorageKeys("tp0of2", "HND"),
        StorageKeys("tp0of2", "NHD", namespace="other"),
    ]:
        looking = start(tier, keys=keys).exists(KEYS[:1])
        assert looking.wait()
        assert looking.result == [False]
    same = start(tier, keys=StorageKeys("tp0of2", "NHD")).exists(KEYS[:1])
    assert same.wait()
    assert same.result == [True]


def test_d9_after_a_reset_nothing_from_before_is_found(start, slab):
    """D9: new names after a reset: what was stored isn't found, here or by another that was reset; new blocks are."""
    tier = DictTier()
    keys, others = StorageKeys("all"), StorageKeys("all")
    client, other = start(tier, keys=keys), start(tier, keys=others)
    fill(slab, 0, 1)
    assert client.put(KEYS[:1], [0]).wait()
    keys.renew()
    others.renew()
    for each in (client, other):
        looking = each.exists(KEYS[:1])
        assert looking.wait()
        assert looking.result == [False]
    assert client.put(KEYS[:1], [0]).wait()
    found = [each.exists(KEYS[:1]) for each in (client, other)]
    assert all(looking.wait() for looking in found)
    assert [looking.result for looking in found] == [[True], [False]]
    # A process that starts again finds what was stored before.
    fresh = start(tier, keys=StorageKeys("all")).exists(KEYS[:1])
    assert fresh.wait()
    assert fresh.result == [True]


@pytest.mark.parametrize("spoil", ["flip", "cut", "swap", "foreign", "empty"])
def test_a9_a_damaged_value_is_a_miss_and_goes(start, slab, stats, caplog, spoil):
    """A9: a flipped bit, a truncated, exchanged or foreign value is a miss, counted, logged, and makes way."""
    tier = DictTier()
    client = start(tier)
    for slot in range(2):
        fill(slab, slot, slot)
    assert client.put(KEYS[:2], [0, 1]).wait()
    first, second = list(tier.values)
    value = bytearray(tier.values[first])
    value[1000] ^= 4
    tier.values[first] = {
        "flip": bytes(value),
        "cut": tier.values[first][:-1],
        "swap": tier.values[second],
        "foreign": b"<html>502</html>",
        "empty": b"",
    }[spoil]
    reading = client.get(KEYS[:2], [4, 5])
    assert reading.wait()
    assert reading.result == [False, True]
    assert stats.get("l2_damaged:dict") == 1
    assert "is a miss" in caplog.text
    assert first not in tier.values
    assert client.put(KEYS[:1], [0]).wait()
    again = client.get(KEYS[:1], [4])
    assert again.wait()
    assert again.result == [True]


def test_i8_a_call_that_hangs_ends_at_its_deadline_and_keeps_its_slot(start, slab, stats):
    """I8: the operation ends as a miss; the memory is released only when the call returns, with what it brought."""
    tier = FaultyTier()
    client = start(tier, timeout=SHORT, breaker=never())
    block = fill(slab, 0, 3)
    assert client.put(KEYS[:1], [0]).wait()
    tier.going.clear()
    holder = Holder()
    reading = client.get(KEYS[:1], [7], released=holder)
    assert reading.wait()
    assert reading.outcome is Outcome.TIMEOUT
    assert reading.result == [False]
    assert holder.released == []
    assert (slab.view(7) == 0).all()
    tier.going.set()
    eventually(lambda: holder.released)
    assert holder.released == [[True]]
    assert slab.view(7).tobytes() == block
    assert reading.result == [False], "the result doesn't change when it has been told"
    assert stats.get("l2_timeouts:faulty") == 1


def test_operations_whose_turn_doesnt_come_end_too(start, slab, stats):
    """With all threads in calls that hang, what waits for its turn ends at its deadline, and its memory is free."""
    tier = FaultyTier()
    tier.max_calls = 2
    client = start(tier, timeout=SHORT, lookup_timeout=SHORT, breaker=never())
    tier.going.clear()
    hung = [client.get([key], [slot]) for slot, key in enumerate(KEYS[:2])]
    holder = Holder()
    waiting = client.get(KEYS[2:3], [2], released=holder)
    assert all(operation.wait() for operation in [*hung, waiting])
    assert waiting.outcome is Outcome.DROPPED
    assert holder.released == [None]
    assert stats.get("l2_dropped:faulty") == 1
    assert tier.calls["get"] == 2


def test_writes_leave_a_thread_for_reads(start, slab):
    """However many writes hang, a lookup still has a thread."""
    tier = FaultyTier()
    tier.max_calls = 3
    client = start(tier, timeout=60, breaker=never())
    tier.going.clear()
    for slot, key in enumerate(KEYS[:6]):
        client.put([key], [slot])
    for _ in range(2):
        tier.waiting.acquire(timeout=10)
    looking = client.exists(KEYS[:1])
    assert tier.waiting.acquire(timeout=10), "the lookup isn't made"
    assert tier.calls["put"] == 2
    tier.going.set()
    assert looking.wait()


def test_a_cancelled_operation_makes_no_call(start, slab):
    """What hasn't begun can be dropped; its memory is free at once. What has begun goes on."""
    tier = FaultyTier()
    tier.max_calls = 1
    client = start(tier, timeout=60, breaker=never())
    fill(slab, 0, 1)
    assert client.put(KEYS[:1], [0]).wait()
    tier.going.clear()
    holders = Holder(), Holder()
    running = client.get(KEYS[:1], [1], released=holders[0])
    assert tier.waiting.acquire(timeout=10)
    waiting = client.get(KEYS[1:2], [2], released=holders[1])
    client.cancel([running, waiting])
    assert waiting.ended
    assert holders[1].released == [None]
    assert not running.ended
    tier.going.set()
    assert running.wait()
    assert running.result == [True]
    assert tier.calls["get"] == 1


@pytest.mark.parametrize(
    "error",
    [
        TierError("10.0.0.1:6379: it is loading"),
        TierTimeoutError("10.0.0.1:6379"),
        OSError(5, "EIO"),
        MemoryError(),
        SystemExit(1),
    ],
)
def test_i7_a_failing_tier_is_left_alone_and_recovers_by_itself(start, slab, stats, caplog, error):
    """I7, A7: errors are misses, logged now and then; after three no calls are made, until a probe works."""
    tier = FaultyTier()
    client = start(tier, breaker=Breaker(failures=3, first=SHORT, longest=SHORT))
    tier.error = error
    for _ in range(3):
        looking = client.exists(KEYS[:2])
        assert looking.wait()
        assert looking.result == [False, False]
    assert not client.health.works()
    calls = tier.calls["get"] + tier.calls["put"]
    for operation in (client.get(KEYS[:1], [0]), client.put(KEYS[:1], [0])):
        assert operation.ended
        assert operation.outcome is Outcome.DROPPED
    assert tier.calls["get"] + tier.calls["put"] == calls
    assert stats.get("l2_skipped:faulty") == 2
    assert stats.get("l2_errors:faulty") + stats.get("l2_timeouts:faulty") == 3
    assert caplog.text.count("is left alone") == 1
    assert caplog.text.count("that is a miss") == 1
    tier.error = None
    eventually(client.health.works)
    looking = client.exists(KEYS[:1])
    assert looking.wait()
    assert looking.outcome is Outcome.DONE


def test_a_hung_tier_is_probed_by_one_thread_at_a_time(start, slab):
    """While a probe hangs there is no other: a tier that never answers costs a few threads, not ever more."""
    tier = FaultyTier()
    tier.max_calls = 2
    client = start(tier, timeout=SHORT, lookup_timeout=SHORT, breaker=Breaker(failures=2, first=SHORT, longest=SHORT))
    tier.going.clear()
    for _ in range(2):
        assert client.exists(KEYS[:1]).wait()
    eventually(lambda: tier.calls["exists"] == 3)
    threads = threading.active_count()
    time.sleep(4 * SHORT)
    assert tier.calls["exists"] == 3
    assert threading.active_count() == threads
    tier.going.set()
    eventually(client.health.works)


def test_i16_a_tier_that_is_down_at_start_is_named_and_used_later(slab, stats, caplog):
    """I16: the error names the place; in the background the tier is tried again, and used as soon as it works."""
    tier = FaultyTier()
    tier.open_error = TierError("10.0.0.1:6379 refuses connections")
    client = make_client(tier, slab, stats, breaker=Breaker(first=SHORT, longest=SHORT))
    try:
        with pytest.raises(TierError, match=r"10\.0\.0\.1:6379"):
            client.start()
        assert client.exists(KEYS[:1]).outcome is Outcome.DROPPED
        eventually(lambda: tier.calls["open"] > 2)
        tier.open_error = None
        eventually(client.health.works)
        assert tier.registered == [slab.nbytes]
        assert client.put(KEYS[:1], [0]).wait()
        assert len(tier.values) == 1
    finally:
        client.close()


def test_i16_a_tier_that_hangs_at_start_is_given_up(slab, stats):
    """I16: an open that doesn't return ends at its deadline with the place; if it returns later, the tier is used."""
    tier = FaultyTier()
    gate = threading.Event()
    opening = tier.open
    tier.open = lambda **arguments: (gate.wait(30), opening(**arguments))
    client = make_client(tier, slab, stats, breaker=Breaker(first=SHORT, longest=SHORT))
    try:
        with pytest.raises(TierTimeoutError, match=r"a dict didn't answer in 0\.05 s"):
            client.start(SHORT)
        gate.set()
        eventually(client.health.works)
    finally:
        client.close()


def test_no_secret_of_a_librarys_error_is_logged(start, slab, caplog):
    """What another library's exception says may have a password in it: its type and place are logged, not its text."""
    tier = FaultyTier()
    client = start(tier)
    tier.error = ValueError("valkey://user:hunter2@10.0.0.1")
    with caplog.at_level(logging.DEBUG):
        for _ in range(4):
            assert client.exists(KEYS[:1]).wait()
    assert "ValueError in tiers.py, line" in caplog.text
    assert "hunter2" not in caplog.text


def test_an_answer_of_another_length_is_an_error(start, slab, stats):
    """A tier that answers more or fewer keys than it was asked is treated as one that fails."""
    tier = DictTier()
    client = start(tier)
    tier.exists = lambda _keys, _timeout: [True]
    looking = client.exists(KEYS[:2])
    assert looking.wait()
    assert looking.result == [False, False]
    assert stats.get("l2_errors:dict") == 1


def test_closing_writes_what_is_waiting(slab):
    """Writes that were accepted are made before the tier is closed; later operations make no calls."""
    tier = DictTier()
    client = make_client(tier, slab)
    client.start()
    for slot, key in enumerate(KEYS):
        client.put([key], [slot])
    client.close()
    client.close()
    assert len(tier.values) == len(KEYS)
    assert tier.calls["close"] == 1
    assert client.exists(KEYS[:1]).outcome is Outcome.DROPPED


def test_drained_is_what_follows_too(start, slab):
    """A call that leads to another one when it ends: both have ended when nothing is under way any more."""
    client = start(DictTier())
    fill(slab, 0, 1)
    assert client.put(KEYS[:1], [0]).wait()
    for _ in range(100):
        read = []

        def then(_, read=read):
            time.sleep(0.001)
            client.get(KEYS[:1], [1], urgent=False, released=read.append)

        client.exists(KEYS[:1], urgent=False, released=then)
        assert client._calls.drain(time.monotonic() + 30)
        assert read == [[True]]


def test_closing_leaves_no_threads_and_doesnt_wait_for_ever(slab, monkeypatch):
    """Threads end with the client; one whose call hangs ends with the call, and its memory stays until then."""
    monkeypatch.setattr("kvplug.store.l2.client._DRAIN_SECONDS", SHORT)
    monkeypatch.setattr("kvplug.store.l2.client._CLOSE_SECONDS", SHORT)
    before = threading.active_count()
    tier = FaultyTier()
    client = make_client(tier, slab, timeout=SHORT, breaker=never())
    client.start()
    fill(slab, 0, 1)
    assert client.put(KEYS[:1], [0]).wait()
    tier.going.clear()
    holder = Holder()
    client.get(KEYS[:1], [1], released=holder)
    assert tier.waiting.acquire(timeout=10)
    client.close()
    assert holder.released == []
    slab.close()
    tier.going.set()
    eventually(lambda: threading.active_count() == before)
    assert holder.released
