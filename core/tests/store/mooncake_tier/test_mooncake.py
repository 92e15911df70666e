"""What the tier `mooncake` does beyond the contract, on a real store in good order."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from kvplug.store.l2.tier import TierError, Usage
from support import mooncake

pytestmark = pytest.mark.server

MIB = 1 << 20


def opened(tier, timeout=2.0):
    tier.open(max_value_bytes=MIB, timeout=timeout)
    return tier


def put(tier, values):
    return tier.put(list(values), [memoryview(bytearray(value)) for value in values.values()], 2.0)


def get(tier, keys, length=MIB):
    buffers = [bytearray(length) for _ in keys]
    lengths = tier.get(keys, list(map(memoryview, buffers)), 2.0)
    return [None if n is None else bytes(buffer[:n]) for n, buffer in zip(lengths, buffers, strict=True)]


def test_a_leased_key_that_was_deleted_is_gone_here_and_can_be_replaced(make_tier):
    """A damaged value that is read again and again stays leased; once deleted, a good one can take its place."""
    tier, other = opened(make_tier()), opened(make_tier())
    put(tier, {b"a": b"damaged", b"b": b"good"})
    assert get(tier, [b"a", b"b"]) == [b"damaged", b"good"]
    tier.delete([b"a"], 2.0)
    assert get(other, [b"a"]) == [b"damaged"], "it wasn't leased, so this tests nothing"
    assert tier.exists([b"a", b"b"], 2.0) == [False, True]
    assert get(tier, [b"a", b"b"]) == [None, b"good"]
    assert put(tier, {b"a": b"mended, and longer", b"c": b"new"}) == [True, True]
    assert get(tier, [b"a", b"b", b"c"]) == [b"mended, and longer", b"good", b"new"]
    assert get(other, [b"a"]) == [b"mended, and longer"]


def test_an_empty_value_is_not_kept(make_tier):
    """Mooncake has no empty values: one is refused alone, and is a miss."""
    tier = opened(make_tier())
    assert put(tier, {b"empty": b"", b"a": b"a"}) == [False, True]
    assert get(tier, [b"empty", b"a"]) == [None, b"a"]


def test_a_key_that_comes_twice_fills_both_buffers(make_tier):
    """Mooncake reports both as read and fills one; where the buffers differ, each is measured by its own."""
    tier = opened(make_tier())
    value = bytes(range(256)) * 4
    put(tier, {b"a": value})
    buffers = [bytearray(length) for length in (1024, 1023, 2000)]
    assert tier.get([b"a"] * 3, list(map(memoryview, buffers)), 2.0) == [1024, None, 1024]
    assert bytes(buffers[0]) == bytes(buffers[2][:1024]) == value


def test_values_can_be_read_only_memory(make_tier):
    """Nothing is written to a value, so memory that can't be written is fine."""
    tier = opened(make_tier())
    assert tier.put([b"a"], [memoryview(b"constant")], 2.0) == [True]
    assert get(tier, [b"a"]) == [b"constant"]


def test_keys_of_others_are_left_alone(make_tier, store):
    """Other programs have keys of their own in the same store, also where they chose the same bytes."""
    from mooncake.store import MooncakeDistributedStore

    foreign = MooncakeDistributedStore()
    assert foreign.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", store.address) == 0
    try:
        assert foreign.put(b"a".hex(), b"foreign") == 0
        tier = opened(make_tier())
        assert get(tier, [b"a"]) == [None]
        put(tier, {b"a": b"ours"})
        tier.delete([b"a"], 2.0)
        assert foreign.get(b"a".hex()) == b"foreign"
    finally:
        foreign.close()


def test_fewer_copies_than_asked_for_are_noticed(make_tier, store, caplog):
    """With one node and two copies wanted Mooncake stores one and reports success; the tier counts, and warns once."""
    tier = opened(make_tier(mooncake_replicas=2))
    assert put(tier, {b"a": b"a", b"b": b"b"}) == [True, True]
    assert put(tier, {b"c": b"c"}) == [True]
    assert tier.under_replicated == 3
    warnings = [record.getMessage() for record in caplog.records if "copies" in record.getMessage()]
    assert len(warnings) == 1
    assert store.address in warnings[0]


def test_copies_outlive_a_node(make_tier, client_library):
    """With two copies, every value is still there when one of two nodes has been killed."""
    values = {b"%d" % number: b"value %d" % number * 1000 for number in range(16)}
    with mooncake.mooncake_store(64 * MIB, 64 * MIB, client_ttl=1) as store:
        tier = opened(make_tier(store, mooncake_replicas=2))
        assert put(tier, values) == [True] * 16
        assert tier.under_replicated == 0
        store.remove_node(store.nodes[0])
        assert get(tier, list(values), 16_000) == list(values.values())
        tier.close()


def test_usage_comes_from_the_masters_metrics(make_tier, store):
    """With the address of the metrics, usage is what the store holds; without, nothing is known."""
    tier = opened(make_tier(mooncake_metrics=store.metrics_address))
    before = tier.usage(2.0)
    put(tier, {b"a": bytes(1000), b"b": bytes(2000)})
    used = before.used_bytes + 3000  # what another test left half-written goes after half a minute
    assert tier.usage(2.0) == Usage(used_bytes=used, capacity_bytes=128 * MIB, entries=before.entries + 2)
    assert opened(make_tier()).usage(2.0) == Usage()


def test_a_wrong_address_of_the_metrics_is_an_error_that_names_it(make_tier, store):
    """Usage fails with one sentence where nobody listens, or somebody else; values are served all the same."""
    nobody = f"127.0.0.1:{mooncake.free_port()}"
    for address in (nobody, store.address):
        tier = opened(make_tier(mooncake_metrics=address))
        with pytest.raises(TierError, match=address):
            tier.usage(1.0)
        assert put(tier, {b"a": b"a"}) == [True]


def test_descriptors_and_threads_stay_the_same(make_tier):
    """Mooncake keeps some descriptors and threads after its first uses; opening and closing again adds none."""

    def use():
        tier = opened(make_tier())
        tier.register(memoryview(bytearray(MIB)))
        put(tier, {b"a": bytes(100_000)})
        assert get(tier, [b"a", b"b"]) == [bytes(100_000), None]
        tier.close()

    def count():
        gc.collect()
        return [sum(1 for _ in Path("/proc/self", kind).iterdir()) for kind in ("fd", "task")]

    for _ in range(3):
        use()
    before = count()
    for _ in range(3):
        use()
    assert count() == before
