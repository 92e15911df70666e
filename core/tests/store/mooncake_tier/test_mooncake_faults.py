"""The tier `mooncake` when master, nodes or network fail: real servers, killed, stopped and restarted."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kvplug.store.l2.mooncake import tier as tier_module
from kvplug.store.l2.tier import TierError, TierTimeoutError
from support import mooncake

pytestmark = pytest.mark.server

MIB = 1 << 20
TIMEOUT = 1.0


@pytest.fixture
def broken_store(client_library):
    """Return a store of the test's own, with two nodes."""
    with mooncake.mooncake_store(64 * MIB, 64 * MIB, client_ttl=30, lease_ms=5000) as store:
        yield store


def opened(tier):
    tier.open(max_value_bytes=MIB, timeout=TIMEOUT)
    return tier


def put(tier, values):
    return tier.put(list(values), [memoryview(bytearray(value)) for value in values.values()], TIMEOUT)


def get(tier, keys):
    buffers = [bytearray(MIB) for _ in keys]
    lengths = tier.get(keys, list(map(memoryview, buffers)), TIMEOUT)
    return [None if n is None else bytes(buffer[:n]) for n, buffer in zip(lengths, buffers, strict=True)]


def eventually(condition):
    """Say whether something is true within half a minute; an error counts as false."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(TierError):
            if condition():
                return True
        time.sleep(0.1)
    return False


def values_of(count):
    return {b"%d" % number: bytes([number]) * 100_000 for number in range(count)}


def test_i16_a_master_that_is_down_is_named_with_host_and_port(make_tier, store):
    """Opening fails at once where nobody listens, with one sentence that says where."""
    from kvplug.store.l2.mooncake import MooncakeTier

    address = f"127.0.0.1:{mooncake.free_port()}"
    tier = MooncakeTier(MooncakeTier.Settings(mooncake_master=address))
    with pytest.raises(TierError, match=rf"^Mooncake's master at {address} .*: start it, or correct the address\.$"):
        tier.open(max_value_bytes=MIB, timeout=TIMEOUT)
    with pytest.raises(TierError, match="isn't open"):
        tier.exists([b"a"], TIMEOUT)


def test_i16_a_host_without_a_name_is_an_error_that_names_it(client_library):
    """A host that doesn't exist is a TierError too."""
    from kvplug.store.l2.mooncake import MooncakeTier

    tier = MooncakeTier(MooncakeTier.Settings(mooncake_master="no-such-host.invalid:1"))
    with pytest.raises(TierError, match=r"no-such-host\.invalid:1"):
        tier.open(max_value_bytes=MIB, timeout=TIMEOUT)


def test_i16_a_server_that_says_nothing_fails_the_start(client_library):
    """What listens at the master's address may be something else, or hang: opening ends with an error all the same."""
    from kvplug.store.l2.mooncake import MooncakeTier

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        tier = MooncakeTier(MooncakeTier.Settings(mooncake_master=address))
        with pytest.raises(TierError, match=address):
            tier.open(max_value_bytes=MIB, timeout=TIMEOUT)


def test_i7_a_master_that_was_restarted_is_used_again(make_tier, broken_store, monkeypatch):
    """While the master is gone each call is an error; when it is back, with nothing in it, the same tier works."""
    tier = opened(make_tier(broken_store))
    values = values_of(8)
    assert put(tier, values) == [True] * 8
    capacity = int(broken_store.metric("master_total_capacity_bytes"))
    broken_store.master.kill()
    calls = [
        lambda: get(tier, list(values)),
        lambda: put(tier, {b"new": b"new"}),
        lambda: tier.exists(list(values), TIMEOUT),
        lambda: tier.delete([b"0"], TIMEOUT),
    ]
    for call in calls:
        with pytest.raises(TierError, match=broken_store.address):
            call()
    # From the second call on, Mooncake isn't asked any more: its own attempts take four seconds each.
    with monkeypatch.context() as patch:
        patch.setattr(tier_module.Connection, "call", lambda *_: pytest.fail("Mooncake was asked"))
        for call in calls:
            with pytest.raises(TierError, match=broken_store.address):
                call()
    broken_store.start_master()
    broken_store.wait_for_capacity(capacity)
    assert get(tier, list(values)) == [None] * 8
    assert put(tier, values) == [True] * 8
    assert get(tier, list(values)) == list(values.values())


def test_i8_a_master_that_hangs_is_a_timeout(make_tier, broken_store):
    """A stopped master is a TierTimeoutError for each operation, and all is well when it goes on."""
    tier = opened(make_tier(broken_store))
    values = values_of(4)
    put(tier, values)
    broken_store.master.pause()
    try:
        for call in (
            lambda: get(tier, list(values)),
            lambda: put(tier, {b"new": b"new"}),
            lambda: tier.exists(list(values), TIMEOUT),
        ):
            with pytest.raises(TierTimeoutError, match=broken_store.address):
                call()
    finally:
        broken_store.master.resume()
    assert get(tier, list(values)) == list(values.values())


def test_i8_a_node_that_hangs_costs_hits_and_nothing_else(make_tier, broken_store, caplog):
    """Of a batch that two nodes have, one of them stopped, what comes is right, and the rest are misses or an error.

    Sometimes Mooncake lets the transfers from the other node fail as well; then no value comes at all.
    """
    tier = opened(make_tier(broken_store))
    values = values_of(24)
    put(tier, values)
    assert get(tier, list(values)) == list(values.values())
    found = None
    broken_store.nodes[0].pause()
    try:
        with suppress(TierError):
            found = get(tier, list(values))
    finally:
        broken_store.nodes[0].resume()
    if found is not None:
        assert 0 < sum(value is None for value in found) < 24
        assert all(value in (None, right) for value, right in zip(found, values.values(), strict=True))
        assert [r.getMessage() for r in caplog.records if "they count as misses" in r.getMessage()]
    assert eventually(lambda: get(tier, list(values)) == list(values.values()))


def test_i8_no_value_at_all_from_nodes_that_hang_is_an_error(make_tier, broken_store):
    """Where values are there and none can be had, the tier fails, so that it is left alone for a while."""
    tier = opened(make_tier(broken_store))
    values = values_of(4)
    put(tier, values)
    assert get(tier, list(values)) == list(values.values())
    for node in broken_store.nodes:
        node.pause()
    try:
        with pytest.raises(TierError, match=broken_store.address):
            get(tier, list(values))
    finally:
        for node in broken_store.nodes:
            node.resume()


def test_i8_closing_under_a_call_that_hangs_ends_neither_the_process_nor_the_memory(make_tier, broken_store):
    """A read waits for a stopped node while the tier is closed: it ends by itself, and then the client is closed."""
    tier = opened(make_tier(broken_store))
    values = values_of(4)
    put(tier, values)
    assert get(tier, list(values)) == list(values.values())
    connection = tier._connection
    for node in broken_store.nodes:
        node.pause()
    try:
        with ThreadPoolExecutor(1) as threads:
            inside = threading.Event()

            def read():
                inside.set()
                return get(tier, list(values))

            call = threads.submit(read)
            inside.wait()
            while not connection._calls and not call.done():
                pass
            connection.close(wait=0)
            assert not call.done()
            with pytest.raises(TierError):
                call.result(timeout=60)
    finally:
        for node in broken_store.nodes:
            node.resume()
    with pytest.raises(TierError, match="closed"):
        get(tier, [b"0"])


def test_i5_a_full_store_refuses_and_goes_on(make_tier, broken_store, caplog):
    """Where there is no room and all keys are leased, puts are refused; reads work, and room comes again."""
    tier = opened(make_tier(broken_store))
    value = memoryview(bytearray(MIB))
    kept = []
    for batch in range(10):
        keys = [b"%d %d" % (batch, number) for number in range(16)]
        kept += [key for key, done in zip(keys, tier.put(keys, [value] * 16, TIMEOUT), strict=True) if done]
        tier.exists(keys, TIMEOUT)  # leases them
    assert 0 < len(kept) <= 128
    assert len(kept) < 160
    assert [r.getMessage() for r in caplog.records if "has no room" in r.getMessage()]
    assert get(tier, kept[-1:]) == [bytes(MIB)]
    broken_store.clear()
    assert put(tier, {b"new": b"new"}) == [True]


def test_a_store_without_nodes_refuses(make_tier, client_library):
    """A master that no node has come to yet keeps nothing, and finds nothing."""
    with mooncake.mooncake_store() as store:
        tier = opened(make_tier(store))
        assert put(tier, {b"a": b"a"}) == [False]
        assert get(tier, [b"a"]) == [None]
        tier.close()
