"""L1 and L2 together: what is written and when, what is read, what happens when a tier fails or hangs."""

from __future__ import annotations

import threading
import time

import pytest
from tiers import DictTier, FaultyTier, eventually, fill, make_client

from kvplug.stats import Stats
from kvplug.store import Allocator, MemoryTier, Slab
from kvplug.store.l2.breaker import Breaker
from kvplug.store.l2.keys import StorageKeys
from kvplug.store.l2.value import HEADER_BYTES
from kvplug.store.policies import make_policy, policy_names
from kvplug.store.tiered import TieredStore

BLOCK = 8192
SHORT = 0.05
LONG = 30.0
KEYS = [bytes([number]) * 32 for number in range(64)]


class Node:
    """An engine's store, over tiers that others may have too."""

    def __init__(self, *tiers, slots=64, eviction="lru", client_settings=None, **settings):
        self.stats = Stats()
        self.memory = MemoryTier(
            Slab(slots, BLOCK, header_bytes=HEADER_BYTES), Allocator(slots, make_policy(eviction, slots))
        )
        self.names = StorageKeys("all")
        breaker = {"breaker": Breaker(failures=1000)}
        self.clients = [
            make_client(tier, self.memory.slab, self.stats, keys=self.names, **(client_settings or breaker))
            for tier in tiers
        ]
        for client in self.clients:
            client.start()
        self.store = TieredStore(
            self.memory, self.clients, self.stats, renew=self.names.renew, **({"load_timeout": LONG} | settings)
        )

    def save(self, keys):
        """Save blocks whose bytes follow from their keys; return how many were new."""
        refs = self.store.reserve(keys)
        for key, ref in zip(keys, refs, strict=True):
            if ref is not None:
                fill(self.memory.slab, ref.slot, key[0])
        return self.store.publish([ref for ref in refs if ref is not None])

    def load(self, keys, timeout=LONG):
        """Load blocks, check what is in them, and return how many there were."""
        refs = self.store.pin(keys, time.monotonic() + timeout)
        try:
            for key, ref in zip(keys, refs, strict=False):
                expected = bytes((key[0] * 37 + index * 11) & 0xFF for index in range(BLOCK))
                assert self.memory.slab.view(ref.slot).tobytes() == expected
        finally:
            self.store.unpin(refs)
        return len(refs)

    def settle(self):
        """Wait until nothing is on its way to or from L2."""
        for client in self.clients:
            assert client._calls.drain(time.monotonic() + 30)

    def in_l1(self):
        return {key for key in KEYS if self.memory.allocator.prefix_length([key])}

    def held(self):
        """Count what keeps slots from being evicted."""
        allocator = self.memory.allocator
        return sum(allocator._pins) + sum(state == 1 for state in allocator._state)


@pytest.fixture
def node():
    """Make a store; it is closed when the test ends."""
    nodes = []

    def make(*tiers, **settings):
        nodes.append(Node(*tiers, **settings))
        return nodes[-1]

    yield make
    for each in nodes:
        for client in each.clients:
            if isinstance(client.tier, FaultyTier):
                client.tier.going.set()
                client.tier.error = None
        each.settle()
        assert each.held() == 0, "a slot is still pinned or reserved"
        each.store.close()


def test_the_second_engine_starts_warm(node):
    """What one engine saved, another finds in the tier that they share, and then in its own L1."""
    shared = {}
    one, other = node(DictTier(shared)), node(DictTier(shared))
    assert one.save(KEYS[:8]) == 8
    one.settle()
    assert other.load(KEYS[:10]) == 8
    assert other.in_l1() == set(KEYS[:8])
    reads = other.clients[0].tier.calls["get"]
    assert other.load(KEYS[:8]) == 8
    assert other.clients[0].tier.calls["get"] == reads
    # What came from the tier isn't written there again.
    other.settle()
    assert other.clients[0].tier.calls["put"] == 0


def test_without_l2_there_is_only_l1(node):
    """A store without tiers does what L1 does."""
    store = node()
    assert store.save(KEYS[:4]) == 4
    assert store.load(KEYS[:6]) == 4
    store.store.announce(KEYS[:4])
    assert store.store.gauges() == {}
    assert store.store.clear()
    assert store.load(KEYS[:4]) == 0


@pytest.mark.parametrize("gap", range(6))
def test_a6_b8_the_run_ends_at_the_first_gap(node, gap):
    """A6: wherever a block is missing in all tiers, the hit ends right there, and nothing behind it is read."""
    tier = DictTier()
    writer, reader = node(tier), node(DictTier(tier.values))
    writer.save([key for number, key in enumerate(KEYS[:6]) if number != gap])
    writer.settle()
    assert reader.load(KEYS[:6]) == gap
    read = [key for operation, keys in reader.clients[0].tier.log if operation == "get" for key in keys]
    assert len(read) == gap


def test_a_gap_in_l1_is_filled_from_l2(node):
    """Blocks of L1 on both sides of a gap aren't asked for; what fills the gap is."""
    tier = DictTier()
    writer, reader = node(tier), node(DictTier(tier.values))
    writer.save(KEYS[:8])
    writer.settle()
    reader.save([*KEYS[:3], *KEYS[5:7]])
    reader.settle()
    assert reader.load(KEYS[:8]) == 8
    asked = [keys for operation, keys in reader.clients[0].tier.log if operation == "exists"]
    assert [[name[:32] for name in keys] for keys in asked] == [[KEYS[3], KEYS[4], KEYS[7]]]


def test_several_tiers_are_asked_in_order(node):
    """The second tier is asked only for what the first doesn't have; a run may come from both, block by block."""
    first, second = {}, {}
    node_a, node_b = node(DictTier(first)), node(DictTier(second))
    node_a.save(KEYS[0:6:2])
    node_b.save(KEYS[0:6])
    for each in (node_a, node_b):
        each.settle()
    reader = node(DictTier(first), DictTier(second))
    assert reader.load(KEYS[:8]) == 6
    lookups = [[keys for operation, keys in client.tier.log if operation == "exists"] for client in reader.clients]
    assert [len(keys) for keys in lookups[0]] == [8]
    assert [len(keys) for keys in lookups[1]] == [5]
    # What only the second had goes to the first, which is asked first next time; the second gets nothing.
    reader.settle()
    assert len(first) == 6
    assert reader.clients[1].tier.calls["put"] == 0


def test_a_miss_costs_one_lookup_per_new_block_and_nothing_else(node):
    """All-miss: each new block is looked up once in the tier; nothing is read, copied, reserved or evicted."""
    store = node(DictTier(), slots=8)
    store.save(KEYS[40:48])
    store.settle()
    tier = store.clients[0].tier
    tier.log.clear()
    before = store.in_l1()
    assert store.load(KEYS[:20]) == 0
    assert [(operation, len(keys)) for operation, keys in tier.log] == [("exists", 20)]
    assert store.memory.allocator.evictions == 0
    assert store.in_l1() == before
    assert store.stats.get("l2_blocks_read:dict") == 0


def test_policy_all_writes_everything_once(node):
    """Each saved block goes to every tier, once, however often it is used or saved again."""
    store = node(DictTier(), DictTier())
    store.save(KEYS[:6])
    store.settle()
    store.save(KEYS[:6])
    store.load(KEYS[:6])
    store.settle()
    assert [len(client.tier.values) for client in store.clients] == [6, 6]
    assert store.stats.get("l2_blocks_written:dict") == 12


@pytest.mark.parametrize("eviction", policy_names())
@pytest.mark.parametrize("load_again", [False, True])
def test_writing_to_l2_is_no_use(node, eviction, load_again):
    """L1 evicts the same blocks in the same order with L2 as without.

    What is loaded again once it was saved is the control: policies that know of use keep it.
    """

    def order_of_eviction(store, *, load=False):
        first = KEYS[:8]
        for start in range(0, 8, 4):
            store.save(first[start : start + 4])
            store.settle()
        store.load(first[5:6])
        if load:
            store.load(first[:2])
        gone = []
        for key in KEYS[16:24]:
            store.save([key])
            store.settle()
            gone += [one for one in first if one not in gone and one not in store.in_l1()]
        return gone

    without = order_of_eviction(node(slots=8, eviction=eviction))
    fast = order_of_eviction(node(DictTier(), DictTier(), slots=8, eviction=eviction), load=load_again)
    assert (fast == without) == (not load_again or eviction == "fifo")


def test_policy_hits_writes_what_is_used_again(node):
    """Blocks go to the tier when they have had so many hits in L1, and only those."""
    store = node(DictTier(), write_policy="hits", min_hits=2)
    store.save(KEYS[:6])
    store.load(KEYS[:4])
    store.settle()
    assert store.clients[0].tier.values == {}
    store.load(KEYS[:2])
    store.load(KEYS[:2])
    store.settle()
    assert {name[:32] for name in store.clients[0].tier.values} == set(KEYS[:2])


def test_policy_evicted_writes_what_l1_loses(node):
    """Blocks go to the tier when L1 evicts them, as they were; those that came from there aren't written again."""
    tier = DictTier()
    store = node(tier, slots=8, write_policy="evicted", write_bytes=1 << 30)
    store.save(KEYS[:8])
    store.settle()
    assert tier.values == {}
    for start in range(8, 24, 2):
        store.save(KEYS[start : start + 2])
        store.settle()
    assert {name[:32] for name in tier.values} == set(KEYS[:16])
    written = store.stats.get("l2_blocks_written:dict")
    assert store.load(KEYS[:4]) == 4
    store.settle()
    # Promoting four evicts four, which are new to the tier.
    assert store.stats.get("l2_blocks_written:dict") == written + 4
    for _ in range(3):  # and going round in what the tier has writes nothing
        for start in range(0, 16, 4):
            assert store.load(KEYS[start : start + 4]) == 4
            store.settle()
    assert store.stats.get("l2_blocks_written:dict") <= 24


def test_what_cant_be_written_now_is_dropped_and_counted(node):
    """Bytes on their way are bounded; the rest is dropped, counted, and written when it is used again."""
    tier = FaultyTier()
    tier.max_calls = 1
    store = node(tier, slots=64, client_settings={"timeout": LONG}, write_bytes=4 * (BLOCK + 64))
    tier.going.clear()
    for start in range(0, 12, 2):
        store.save(KEYS[start : start + 2])
    assert store.stats.get("l2_writes_dropped:faulty") == 8
    assert store.held() == 4
    tier.going.set()
    store.settle()
    assert len(tier.values) == 4
    store.load(KEYS[:8])
    store.settle()
    assert len(tier.values) == 8


def test_i5_writes_never_fill_l1(node):
    """I5: a tier that hangs keeps at most a quarter of L1 from being evicted, so saving and loading go on."""
    tier = FaultyTier()
    store = node(tier, slots=16, client_settings={"timeout": LONG}, write_bytes=1 << 40)
    tier.going.clear()
    for start in range(0, 60, 4):
        assert store.save(KEYS[start : start + 4]) == 4
    assert store.held() <= 4
    assert store.stats.get("l2_writes_dropped:faulty") > 0
    assert store.memory.allocator.refused == 0


def test_i8_a_hung_read_is_a_miss_and_its_slot_is_not_handed_on(node):
    """I8: the load ends at its deadline; the slot stays reserved until the call returns, and then has the block."""
    tier = FaultyTier()
    writer = node(DictTier(tier.values))
    writer.save(KEYS[:2])
    writer.settle()
    settings = {"timeout": LONG, "breaker": Breaker(failures=1000)}
    store = node(tier, slots=4, client_settings=settings, write_policy="hits", min_hits=255)
    real_get = tier.get
    begun, go_on = threading.Event(), threading.Event()

    def slow_get(keys, buffers, timeout):
        begun.set()
        assert go_on.wait(30)
        return real_get(keys, buffers, timeout)

    tier.get = slow_get
    assert store.load(KEYS[:2], timeout=SHORT) == 0
    assert begun.is_set()
    assert store.stats.get("l2_load_timeouts") == 1
    assert store.held() == 2
    # The rest of L1 goes on being used, and nobody gets those two slots.
    for start in range(4, 24, 2):
        assert store.save(KEYS[start : start + 2]) == 2
    assert store.save(KEYS[30:34]) == 2
    go_on.set()
    store.settle()
    assert store.held() == 0
    assert {KEYS[0], KEYS[1]} <= store.in_l1()
    assert store.load(KEYS[:2], timeout=0) == 2


def test_a_load_waits_once_for_all_of_a_step(node):
    """When the time is up, later requests of the step aren't looked up in L2 at all."""
    tier = FaultyTier()
    store = node(tier, client_settings={"lookup_timeout": LONG, "breaker": Breaker(failures=1000)})
    tier.going.clear()
    until = time.monotonic() + SHORT
    for start in range(0, 30, 10):
        assert store.store.pin(KEYS[start : start + 10], until) == []
    assert tier.calls["exists"] == 1


@pytest.mark.parametrize("when", ["before lookup", "between", "in between"])
def test_a_value_may_go_at_any_time(node, when):
    """B5: a block that is deleted after it was looked up is a gap; what came before it is used."""
    tier = DictTier()
    writer, reader = node(tier), node(DictTier(tier.values))
    writer.save(KEYS[:6])
    writer.settle()
    victim = next(name for name in tier.values if name.startswith(KEYS[3]))
    mine = reader.clients[0].tier
    real_exists = mine.exists

    def exists(keys, timeout):
        if when == "before lookup":
            del tier.values[victim]
        found = real_exists(keys, timeout)
        if when != "before lookup":
            del tier.values[victim]
        return found

    mine.exists = exists
    if when == "in between":
        tier.values[next(name for name in tier.values if name.startswith(KEYS[4]))] = b"torn"
    assert reader.load(KEYS[:6]) == 3


def test_a_damaged_value_is_written_again(node):
    """A block that was damaged in the tier is a miss, and after it was computed and saved again it is whole there."""
    tier = DictTier()
    writer, reader = node(tier), node(DictTier(tier.values))
    writer.save(KEYS[:4])
    writer.settle()
    name = next(name for name in tier.values if name.startswith(KEYS[2]))
    tier.values[name] = tier.values[name][:-1] + bytes([tier.values[name][-1] ^ 1])
    assert reader.load(KEYS[:4]) == 2
    reader.save(KEYS[2:4])
    reader.settle()
    third = node(DictTier(tier.values))
    assert third.load(KEYS[:4]) == 4


def test_d9_after_a_reset_nothing_is_found_anywhere(node):
    """D9: a reset empties L1 and leaves L2 behind, also for what was on its way; others still find it."""
    tier = FaultyTier()
    store = node(tier, client_settings={"timeout": LONG, "lookup_timeout": LONG})
    store.save(KEYS[:4])
    store.settle()
    store.memory.allocator.discard(KEYS[:4])
    tier.going.clear()
    store.save(KEYS[8:10])
    store.store.announce(KEYS[:4])
    assert store.load(KEYS[:4], timeout=SHORT) == 0
    store.store.clear()
    tier.going.set()
    store.settle()
    store.settle()
    assert store.in_l1() == set()
    assert store.load(KEYS[:4]) == 0
    assert store.load(KEYS[8:10]) == 0
    store.save(KEYS[:2])
    store.settle()
    store.memory.allocator.discard(KEYS[:2])
    assert store.load(KEYS[:2]) == 2
    other = node(DictTier(tier.values))
    assert other.load(KEYS[:4]) == 4


def test_d9_what_is_evicted_after_a_reset_is_not_from_before(node):
    """D9: with the policy `evicted`, slots with blocks from before the reset write nothing when they get new ones."""
    tier = DictTier()
    store = node(tier, slots=4, write_policy="evicted", write_bytes=1 << 30)
    store.save(KEYS[:4])
    store.store.clear()
    store.save(KEYS[8:12])
    store.settle()
    assert tier.values == {}
    store.save(KEYS[12:13])
    store.settle()
    assert len(tier.values) == 1


def test_prefetch_brings_announced_blocks_ahead(node):
    """Announced blocks are in L1 before they are asked for: the load itself makes no call."""
    tier = DictTier()
    writer, reader = node(tier), node(DictTier(tier.values))
    writer.save(KEYS[:8])
    writer.settle()
    reader.store.announce(KEYS[:10])
    reader.settle()
    eventually(lambda: len(reader.in_l1()) == 8)
    mine = reader.clients[0].tier
    mine.log.clear()
    assert reader.load(KEYS[:8]) == 8
    assert mine.log == []
    assert reader.stats.get("l2_prefetched") == 8


def test_prefetch_is_bounded(node):
    """Blocks on their way for requests that wait are bounded; the rest is left out and counted, and others get room."""
    tier = FaultyTier()
    writer = node(DictTier(tier.values))
    for start in range(0, 40, 8):
        writer.save(KEYS[start : start + 8])
        writer.settle()
    reader = node(
        tier, slots=64, client_settings={"timeout": LONG, "lookup_timeout": LONG}, prefetch_bytes=6 * (BLOCK + 64)
    )
    tier.going.clear()
    reader.store.announce(KEYS[:10])
    reader.store.announce(KEYS[10:20])
    assert reader.stats.get("l2_prefetches_dropped") == 14
    tier.going.set()
    eventually(lambda: len(reader.in_l1()) == 6)
    reader.settle()
    reader.store.announce(KEYS[20:24])
    eventually(lambda: len(reader.in_l1()) == 10)
    assert reader.stats.get("l2_prefetches_dropped") == 14


def test_a_load_joins_a_prefetch_under_way(node):
    """A request that is scheduled while its blocks are on their way waits for those calls, and makes none again."""
    tier = FaultyTier()
    writer = node(DictTier(tier.values))
    writer.save(KEYS[:4])
    writer.settle()
    reader = node(tier, client_settings={"timeout": LONG, "lookup_timeout": LONG})
    real_get = tier.get
    begun, go_on = threading.Event(), threading.Event()

    def slow_get(keys, buffers, timeout):
        begun.set()
        assert go_on.wait(30)
        return real_get(keys, buffers, timeout)

    tier.get = slow_get
    reader.store.announce(KEYS[:4])
    assert begun.wait(30)
    threading.Timer(SHORT, go_on.set).start()
    assert reader.load(KEYS[:4]) == 4
    assert [operation for operation, _ in tier.log] == ["exists", "get"]


def test_prefetch_of_a_failing_tier_leaves_nothing_behind(node):
    """A tier that is down or raises costs the prefetch, and its budget comes back."""
    tier = FaultyTier()
    store = node(tier, slots=64, prefetch_bytes=4 * (BLOCK + 64))
    store.save(KEYS[:4])
    store.settle()
    store.memory.allocator.discard(KEYS[:4])
    for error in (OSError(5, "EIO"), None):
        tier.error = error
        store.store.announce(KEYS[:4])
        store.settle()
        eventually(lambda: store.store._loader._budget._left == 4)
    eventually(lambda: store.in_l1() == set(KEYS[:4]))


def test_a_full_l1_of_pinned_blocks_reads_what_fits(node):
    """I5: where no slot can be had, the hit is as long as there are slots; nothing fails."""
    tier = DictTier()
    writer, reader = node(tier), node(DictTier(tier.values), slots=8)
    writer.save(KEYS[:8])
    writer.settle()
    reader.save(KEYS[20:26])
    reader.settle()
    pinned = reader.store.pin(KEYS[20:26], 0.0)
    assert reader.load(KEYS[:8]) == 2
    reader.store.unpin(pinned)
    assert reader.load(KEYS[:8]) == 8


def test_gauges_tell_what_tiers_hold_and_whether_they_work(node):
    """Usage is asked for in the background, now and then; a tier that is left alone shows as down."""
    tier = FaultyTier(capacity=1 << 20)
    store = node(tier, client_settings={"breaker": Breaker(failures=1, first=1000)})
    store.save(KEYS[:2])
    store.settle()
    assert store.store.gauges()["l2_down:faulty"] == 0
    eventually(lambda: store.store.gauges().get("l2_usage_bytes:faulty") == 2 * (BLOCK + 64))
    assert store.store.gauges()["l2_capacity_bytes:faulty"] == 1 << 20
    assert tier.calls["usage"] == 1
    tier.error = OSError(5, "EIO")
    assert store.load(KEYS[4:6]) == 0
    eventually(lambda: store.store.gauges()["l2_down:faulty"] == 1)


def test_more_tiers_than_there_is_room_for_are_refused(node):
    """A store has at most eight tiers."""
    with pytest.raises(ValueError, match="at most 8"):
        node(*[DictTier() for _ in range(9)])


# -- Blocks that somebody else is about to want ------------------------------------------------------------------------


def asked_for(tier):
    """Return the keys of each lookup since the log was cleared."""
    return [[name[:32] for name in names] for operation, names in tier.log if operation == "exists"]


def written(tier):
    """Return the keys that were written since the log was cleared."""
    return sorted(name[:32] for operation, names in tier.log if operation == "put" for name in names)


def lose(tier, *keys):
    for name in [name for name in tier.values if name[:32] in keys]:
        del tier.values[name]
    tier.log.clear()


def test_what_a_tier_has_lost_is_written_again(node):
    """Each tier is asked once for what it was given, and is given what it has lost; the others' values stay."""
    store = node(DictTier(), DictTier())
    store.save(KEYS[:6])
    store.settle()
    first, second = (client.tier for client in store.clients)
    lose(first, KEYS[1], KEYS[4])
    lose(second, KEYS[5])
    writer = store.store._writer
    writer.assure(KEYS[:8])
    store.settle()
    assert (asked_for(first), asked_for(second)) == ([KEYS[:6]], [KEYS[:6]])
    assert (written(first), written(second)) == ([KEYS[1], KEYS[4]], [KEYS[5]])
    # What was written again is taken to be there, and nothing is written without need.
    lose(first)
    writer.assure(KEYS[:8])
    store.settle()
    assert (asked_for(first), written(first)) == ([KEYS[:6]], [])
    assert store.held() == 0


def test_what_a_tier_never_had_is_not_asked_for(node):
    """Blocks that aren't in L1, that are being saved, or that the tier wasn't given."""
    tier = DictTier()
    store = node(tier, write_policy="hits", min_hits=1)
    store.save(KEYS[:4])
    store.load(KEYS[:2])
    store.settle()
    refs = store.store.reserve(KEYS[10:12])
    lose(tier, KEYS[0])
    store.store._writer.assure([*KEYS[:4], *KEYS[10:14]])
    store.settle()
    assert asked_for(tier) == [KEYS[:2]]
    assert written(tier) == [KEYS[0]]
    lose(tier)
    store.store._writer.assure(KEYS[2:4])
    store.store._writer.assure([])
    store.settle()
    assert tier.log == []
    store.memory.allocator.abandon([ref for ref in refs if ref is not None])


def test_to_assure_is_no_use(node):
    """Blocks that are only looked after are evicted in their turn, and aren't pinned while a tier is asked."""
    tier = FaultyTier()
    store = node(tier, slots=4, client_settings={"timeout": LONG, "lookup_timeout": LONG})
    for key in KEYS[:4]:
        store.save([key])
    store.settle()
    tier.going.clear()
    store.store._writer.assure(KEYS[:1])
    assert store.held() == 0
    store.save(KEYS[4:5])
    assert KEYS[0] not in store.in_l1()
    tier.going.set()
    store.settle()
    assert written(tier).count(KEYS[0]) == 1  # it was there: nothing else is written


def test_what_is_gone_when_the_answer_comes_is_left_alone(node):
    """Evicted while the tier was asked: another block in its slot isn't taken to be lost."""
    tier = DictTier()
    store = node(tier, slots=4, client_settings={"timeout": LONG, "lookup_timeout": LONG})
    store.save(KEYS[:1])
    store.settle()
    lose(tier, KEYS[0])
    real_exists, go_on = tier.exists, threading.Event()

    def slow_exists(keys, timeout):
        assert go_on.wait(30)
        return real_exists(keys, timeout)

    tier.exists = slow_exists
    store.store._writer.assure(KEYS[:1])
    for number, key in enumerate(KEYS[1:5]):
        store.save([key])
        eventually(lambda number=number: len(tier.values) == number + 1)
    eventually(lambda: store.held() == 0)
    assert KEYS[0] not in store.in_l1()
    go_on.set()
    store.settle()
    assert store.load(KEYS[1:5]) == 4
    store.settle()
    assert written(tier) == KEYS[1:5]


def test_d9_a_reset_while_a_tier_is_asked(node):
    """D9: nothing from before is written under the new names."""
    tier = FaultyTier()
    store = node(tier, client_settings={"timeout": LONG, "lookup_timeout": LONG})
    store.save(KEYS[:2])
    store.settle()
    lose(tier, *KEYS[:2])
    tier.going.clear()
    store.store._writer.assure(KEYS[:2])
    store.store.clear()
    store.save(KEYS[1:2])
    tier.going.set()
    store.settle()
    assert written(tier) == [KEYS[1]]
    assert len(tier.values) == 1


def test_a_tier_that_cant_be_asked_has_lost_nothing(node):
    """A lookup that fails, or isn't made, changes nothing: when the tier works again, nothing is written twice."""
    tier = FaultyTier()
    store = node(tier)
    store.save(KEYS[:2])
    store.settle()
    lose(tier)
    tier.error = OSError(5, "EIO")
    store.store._writer.assure(KEYS[:2])
    store.settle()
    tier.error = None
    store.load(KEYS[:2])
    store.settle()
    assert written(tier) == []
