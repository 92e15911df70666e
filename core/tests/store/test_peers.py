"""What ranks of engines with other parallel sizes have stored: read exactly, or not at all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peer_engines import LAYOUTS, Model, Rank, engine, key_of, name_of
from tiers import DictTier, FaultyTier, eventually

from kvplug.stats import Stats
from kvplug.store.directed import Command, DirectedStore, Executor
from kvplug.store.l2 import peers as peers_module
from kvplug.store.l2.codecs import make_codec
from kvplug.store.l2.value import HEADER_BYTES
from kvplug.store.settings import StoreSettings

KEYS = [key_of(block) for block in range(1, 5)]
NHD = "NHD, K first"


@pytest.fixture(autouse=True)
def _warnings_come_again(monkeypatch):
    monkeypatch.setattr(peers_module._limited, "_seen", {})


@pytest.fixture
def start():
    """Return a function that makes the ranks of an engine; they are closed when the test ends."""
    made = []

    def start(model, sizes, values, layout=NHD, **options):
        ranks = engine(model, layout, sizes, values, **options)
        made.extend(ranks)
        return ranks

    yield start
    for rank in made:
        if isinstance(rank.tier, FaultyTier):
            rank.tier.going.set()
        rank.client.close()


SIZES = [
    ((2, 1), (1, 1)),
    ((1, 1), (2, 1)),
    ((4, 1), (2, 1)),
    ((2, 1), (4, 1)),
    ((8, 1), (1, 1)),
    ((1, 1), (8, 1)),
    ((8, 1), (2, 1)),
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
    ((2, 2), (1, 1)),
    ((1, 1), (2, 2)),
    ((4, 1), (1, 2)),
    ((1, 4), (2, 2)),
    ((2, 2), (4, 4)),
]


def check(start, model, theirs, ours, *, layout=NHD, keys=KEYS):
    """Let one engine save, and all ranks of another read; nothing of it is under the other's own names."""
    values = {}
    for rank in start(model, theirs, values, layout):
        rank.save(*keys)
    ranks = start(model, ours, values, layout, peers=[theirs])
    for rank in ranks:
        assert rank.reasons == []
        assert rank.look_up(*keys) == [True] * len(keys)
        assert rank.read(*keys) == [True] * len(keys)
        own = rank.client.exists(keys)
        assert own.wait()
        assert own.result == [False] * len(keys)
    return ranks


@pytest.mark.parametrize(("theirs", "ours"), SIZES)
def test_blocks_of_another_parallel_size_are_read(start, theirs, ours):
    """Every rank has exactly its heads of its layers, whichever engine has more ranks, or more stages."""
    check(start, Model(), theirs, ours)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("theirs", "ours"), [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (4, 2)), ((4, 2), (2, 1))])
def test_in_every_layout(start, layout, theirs, ours):
    """The same wherever heads, tokens and layers are in memory; down to a single head, whose dimension vanishes."""
    check(start, Model(layers=2, heads=4), theirs, ours, layout=layout)


@pytest.mark.parametrize(("theirs", "ours"), [((4, 1), (1, 1)), ((1, 1), (4, 1)), ((8, 1), (4, 1)), ((2, 1), (8, 1))])
def test_replicated_heads_are_taken_from_any_rank(start, theirs, ours):
    """With more ranks than KV heads, several hold the same: one of them is asked, the first."""
    (first, *_) = check(start, Model(heads=2), theirs, ours)
    asked = [len(names) for operation, names in first.tier.log if operation == "exists"]
    assert asked[0] == len(KEYS) * max(1, min(theirs[0], 2) // min(ours[0], 2))


@pytest.mark.parametrize(("theirs", "ours"), [((4, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 2), (1, 1)), ((1, 1), (2, 2))])
def test_latent_attention_is_the_same_on_every_rank(start, theirs, ours):
    """One value of each stage is enough, and all of it is taken."""
    (first, *_) = check(start, Model(latent=True, heads=16), theirs, ours)
    asked = [len(names) for operation, names in first.tier.log if operation == "exists"]
    assert asked[0] == len(KEYS) * max(1, theirs[1] // ours[1])


@pytest.mark.parametrize(("theirs", "ours"), [((2, 1), (1, 1)), ((1, 1), (4, 1)), ((1, 2), (1, 1)), ((2, 2), (1, 1))])
def test_several_groups_have_blocks_of_their_own(start, theirs, ours):
    """A group's blocks go to its layers, also where groups have different numbers of layers."""
    keys = [key_of(block, group) for block in (1, 2) for group in (0, 1)]
    check(start, Model(layers=6, groups=2), theirs, ours, keys=keys)
    check(start, Model(layers=8, groups=3), theirs, ours, keys=[*keys, key_of(3, 2)])


def test_a_key_of_no_group_is_nowhere(start):
    """A group's number that there isn't is a miss."""
    values = {}
    (theirs,) = start(Model(groups=2), (1, 1), values)
    theirs.save(key_of(1, 0))
    ours = start(Model(groups=2), (2, 1), values, peers=[(1, 1)])[0]
    assert ours.look_up(key_of(1, 0), key_of(1, 7)) == [True, False]
    assert ours.read(key_of(1, 0), key_of(1, 1)) == [True, False]
    reading = ours.peers[0].get([key_of(1, 7), key_of(1, 0)], [2, 3])
    assert reading.wait()
    assert reading.result == [False, True]


@pytest.mark.parametrize("codec", ["zstd", "shuffle-zstd"])
def test_values_of_every_codec_are_read(start, codec):
    """Whatever the other engine's setting: it is in the value. These values are shorter than the block."""
    if codec == "zstd":
        pytest.importorskip("zstandard")
    model = Model(dtype=torch.float16)
    values = {}
    for rank in start(model, (2, 1), values, codec=make_codec(codec, 2)):
        for cache in rank.caches.values():
            cache.fill_(1.5)
        rank.save(*KEYS)
        assert max(map(len, values.values())) < rank.slab.slot_bytes // 4
    (ours,) = start(model, (1, 1), values, peers=[(2, 1)])
    for cache in ours.caches.values():
        cache.fill_(1.5)
    assert ours.read(*KEYS) == [True] * 4


# -- Misses -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(start):
    """Return two ranks that have saved, one that reads them, and the values."""
    values = {}
    theirs = start(Model(), (2, 1), values)
    for rank in theirs:
        rank.save(*KEYS)
    (ours,) = start(Model(), (1, 1), values, peers=[(2, 1)])
    return theirs, ours, values


@pytest.mark.parametrize("rank", [0, 1])
def test_a8_a_missing_shard_is_a_miss(pair, rank):
    """A8: a block of which one rank's value is gone isn't there; the others are."""
    theirs, ours, values = pair
    del values[theirs[rank].keys(KEYS[1])]
    assert ours.look_up(*KEYS) == [True, False, True, True]
    assert ours.read(*KEYS) == [True, False, True, True]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["torn", "flipped", "header", "swapped", "of the other rank"])
def test_a8_a_damaged_shard_is_a_miss(pair, rank, how):
    """A8: a block of which one rank's value isn't whole, or is another one, isn't there. It stays where it is."""
    theirs, ours, values = pair
    name = theirs[rank].keys(KEYS[2])
    value = bytearray(values[name])
    if how == "torn":
        value = value[:-1]
    elif how == "flipped":
        value[-1] ^= 1
    elif how == "header":
        value[30] ^= 1
    elif how == "swapped":
        value = values[theirs[rank].keys(KEYS[3])]
    else:
        value = values[theirs[1 - rank].keys(KEYS[2])]
    values[name] = bytes(value)
    assert ours.read(*KEYS) == [True, True, False, True]
    assert ours.stats.get("l2_damaged:dict") == 1
    assert ours.stats.get("l2_blocks_read:dict") == 3
    assert ours.tier.calls["delete"] == ours.tier.calls["put"] == 0
    assert values[name] == bytes(value)


def test_a_wrong_slice_would_be_noticed(pair):
    """The control: what these tests compare with is different for each head, layer and token."""
    _, ours, _ = pair
    for value in ours.peers[0]._by_group[0]:
        (first, *others) = value.moves[0]
        value.moves = ((replace(first, target_first=4 - first.target_first), *others),)
    slots = range(4)
    reading = ours.peers[0].get(KEYS, slots)
    assert reading.wait()
    assert reading.result == [True] * 4
    assert all(ours.slab.view(slot).tobytes() != ours.expected(key) for key, slot in zip(KEYS, slots, strict=True))


def test_engines_with_another_namespace_arent_found(start):
    """Peers' names have the namespace that the setting says, too."""
    values = {}
    for rank in start(Model(), (2, 1), values, namespace="a"):
        rank.save(*KEYS)
    (same,), (other,) = (start(Model(), (1, 1), values, namespace=name, peers=[(2, 1)]) for name in "ab")
    assert same.look_up(*KEYS) == [True] * 4
    assert other.look_up(*KEYS) == [False] * 4
    assert other.read(*KEYS) == [False] * 4


@pytest.mark.parametrize("change", ["tokens", "width", "dtype", "layout"])
def test_values_of_another_geometry_arent_found(start, change):
    """Other blocks, another type, another memory order: other names."""
    values = {}
    changed = {"tokens": {"tokens": 32}, "width": {"width": 8}, "dtype": {"dtype": torch.float16}}.get(change, {})
    layout = "HND, K first" if change == "layout" else NHD
    for rank in start(Model(**changed), (2, 1), values, layout):
        rank.save(*KEYS)
    (ours,) = start(Model(), (1, 1), values, peers=[(2, 1)])
    assert ours.look_up(*KEYS) == [False] * 4
    assert ours.read(*KEYS) == [False] * 4


# -- Calls ------------------------------------------------------------------------------------------------------------


def test_one_lookup_is_one_call(pair):
    """All names of a batch are asked for at once. Counted are blocks."""
    _, ours, _ = pair
    ours.tier.log.clear()
    assert ours.look_up(*KEYS, key_of(99)) == [True] * 4 + [False]
    ((operation, names),) = ours.tier.log
    assert (operation, len(names)) == ("exists", 10)
    assert len(set(names)) == 10
    assert ours.stats.get("l2_lookups:dict") == 5
    assert ours.stats.get("l2_hits:dict") == 4


def test_memory_is_bounded_and_used_again(pair):
    """Values are read piece by piece, and what is left of a block of which something is missing isn't read."""
    theirs, ours, values = pair
    scratch = ours.peers[0]._scratch
    scratch.nbytes = ours.peers[0]._by_group[0][0].stride * 3
    del values[theirs[0].keys(KEYS[1])]
    ours.tier.log.clear()
    assert ours.read(*KEYS) == [True, False, True, True]
    read = [len(names) for operation, names in ours.tier.log if operation == "get"]
    assert read == [3, 3, 1]
    (piece,) = scratch._free
    assert ours.read(*KEYS) == [True, False, True, True]
    assert scratch._free == [piece]


def test_what_takes_too_long_is_left_out(pair, monkeypatch):
    """Reading ends by itself before its time is up, with the blocks that are there by then: the tier hasn't failed."""
    _, ours, _ = pair
    ours.peers[0]._scratch.nbytes = ours.peers[0]._by_group[0][0].stride
    now, inner = [0.0], ours.tier.get
    monkeypatch.setattr(peers_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(names, buffers, timeout):
        now[0] += 9.0
        return inner(names, buffers, timeout)

    monkeypatch.setattr(ours.tier, "get", slow)
    assert ours.read(*KEYS) == [True, False, False, False]  # of two values each, three in 30 s
    assert now == [27.0]


def test_a_late_call_finds_its_slots_held(start):
    """The operation has ended without a result, and its slot is released only when the call has come back."""
    values = {}
    for rank in start(Model(), (2, 1), values):
        rank.save(*KEYS)
    (ours,) = start(Model(), (1, 1), values, peers=[(2, 1)], tier=FaultyTier)
    ours.client.timeout = 0.05
    heard = []
    ours.tier.going.clear()
    reading = ours.peers[0].get(KEYS, range(4), released=heard.append)
    assert reading.wait()
    assert reading.result == [False] * 4
    assert heard == []
    ours.tier.going.set()
    eventually(lambda: heard)
    assert heard == [[True] * 4]
    assert [ours.slab.view(slot).tobytes() for slot in range(4)] == [ours.expected(key) for key in KEYS]


def test_a_tier_that_fails_is_a_miss(start):
    """What raises is counted as the tier's failure; one that is left alone isn't called."""
    values = {}
    for rank in start(Model(), (2, 1), values):
        rank.save(*KEYS)
    (ours,) = start(Model(), (1, 1), values, peers=[(2, 1)], tier=FaultyTier)
    ours.tier.error = OSError(5, "EIO")
    assert ours.look_up(*KEYS) == [False] * 4
    assert ours.read(*KEYS) == [False] * 4
    assert ours.stats.get("l2_errors:faulty") == 2
    ours.tier.error = None
    ours.client.health.breaker.start_open()
    ours.tier.calls.clear()
    assert ours.look_up(*KEYS) == [False] * 4
    assert ours.tier.calls["exists"] == 0


def test_a_tier_that_answers_too_little_has_failed(pair, monkeypatch):
    """Fewer answers than names are no answers."""
    _, ours, _ = pair
    monkeypatch.setattr(ours.tier, "exists", lambda names, timeout: [True])
    monkeypatch.setattr(ours.tier, "get", lambda names, buffers, timeout: [None])
    assert ours.look_up(*KEYS) == [False] * 4
    assert ours.read(*KEYS) == [False] * 4
    assert ours.stats.get("l2_errors:dict") == 2


def test_d9_after_a_reset_nothing_of_peers_is_found(pair):
    """D9: equal keys may not mean equal blocks any more, here or there."""
    _, ours, _ = pair
    executor = Executor([ours.client], ours.slab, ours.keys, peers=ours.peers)
    found = {}

    def look(number, epoch):
        executor.execute([Command(number, epoch, 1, "exists", tuple(KEYS))], epoch)
        eventually(lambda: (found.update(executor.take_answers()), number in found)[1])
        return found[number][1]

    assert look(1, 0) == (True,) * 4
    assert look(2, 1) == (False,) * 4
    assert ours.read(*KEYS) == [False] * 4


# -- What isn't read --------------------------------------------------------------------------------------------------


def _with(**changes):
    def change(rank):
        for spec in rank.specs:
            spec.__dict__.update(changes)

    return change


def _draft(rank):
    rank.config.speculative_config = SimpleNamespace(method="eagle")


def _state(rank):
    rank.groups = [replace(group, kind="state") for group in rank.groups]


def _context(rank):
    rank.config.parallel_config.decode_context_parallel_size = 2


REFUSED = [
    ("sizes", Model(heads=6), (4, 1), {}, "6 KV heads can't be spread over 4 ranks"),
    ("draft", Model(), (2, 1), {"change": _draft}, "draft model"),
    ("state", Model(), (2, 1), {"change": _state}, "recurrent state"),
    ("context", Model(), (2, 1), {"change": _context}, "context parallelism"),
    ("unlike heads", Model(), (2, 1), {"change": _with(num_kv_heads=4)}, "is unlike the model's others"),
    ("packed", Model(), (2, 1), {"change": _with(num_head_slots=2)}, "num_head_slots is 2"),
    ("states", Model(), (2, 1), {"change": _with(tokens_per_state=4)}, "tokens_per_state is 4"),
    ("content", Model(), (2, 1), {"change": _with(head_size=5)}, "no dimensions for 8 KV heads"),
    ("as many tokens", Model(tokens=8), (2, 1), {}, "any or none may be the 8 KV heads"),
    ("latent parts", Model(latent=True), (2, 1), {"change": _with(max_tp_shards=None)}, "latent vectors may be spread"),
]


@pytest.mark.parametrize(("model", "theirs", "options", "reason"), [case[1:] for case in REFUSED])
def test_what_isnt_sure_isnt_read(start, model, theirs, options, reason):
    """There is a reason that names the engine, and a client that finds nothing holds its place."""
    values = {}
    if model.heads % theirs[0] == 0:
        for rank in start(model, theirs, values):
            rank.save(*KEYS)
    (ours,) = start(model, (1, 1), values, peers=[theirs, (1, 1)], **options)
    assert reason in ours.reasons[0]
    assert f"tensor-parallel size {theirs[0]} and pipeline-parallel size {theirs[1]}" in ours.reasons[0]
    assert len(ours.peers) == 2
    ours.tier.calls.clear()
    assert ours.look_up(*KEYS) == [False] * 4
    assert ours.read(*KEYS) == [False] * 4
    assert not ours.tier.calls


def test_one_head_of_layers_with_different_numbers_isnt_read(start):
    """One head of eight looks like one of four, of which there are two: which it is can't be told, unless all agree."""
    alike = Model(config={"num_key_value_heads": 8, "rope": {"factor": 4}})
    unlike = Model(config={"num_key_value_heads": 8, "swa": {"num_key_value_heads": [4, 4]}})
    assert all(rank.reasons == [] for rank in start(alike, (8, 1), {}, peers=[(1, 1)]))
    assert all("(4, 8)" in rank.reasons[0] for rank in start(unlike, (8, 1), {}, peers=[(1, 1)]))
    assert all(rank.reasons == [] for rank in start(unlike, (4, 1), {}, peers=[(1, 1)]))


def test_stages_are_told_by_layers_names(start):
    """Layers of other stages are known if all are alike and numbered; else what other stages have isn't read."""

    def rename(rank):
        rank.caches = {name.replace("layers.", "x"): cache for name, cache in rank.caches.items()}
        (group,) = rank.kv_cache_config.kv_cache_groups
        group.layer_names = list(rank.caches)
        rank.groups = [replace(rank.groups[0], page_size_bytes=dict.fromkeys(rank.caches))]

    def draft_layer(rank):
        rank.caches[name_of(9)] = torch.zeros_like(rank.caches[name_of(0)])
        rank.kv_cache_config.kv_cache_groups[0].layer_names.append(name_of(9))

    (renamed,) = start(Model(), (1, 1), {}, peers=[(1, 2), (2, 1)], change=rename)
    assert len(renamed.reasons) == 1
    assert "doesn't tell which of the model's layers" in renamed.reasons[0]
    (more,) = start(Model(), (1, 1), {}, peers=[(1, 2), (2, 1)], change=draft_layer)
    assert len(more.reasons) == 1
    assert "layers beyond the model's own" in more.reasons[0]
    groups = start(Model(layers=4, groups=2), (1, 2), {}, peers=[(1, 1), (2, 2)])
    assert all(len(rank.reasons) == 1 and "this rank hasn't" in rank.reasons[0] for rank in groups)
    (lonely,) = start(Model(layers=2, groups=2), (1, 1), {}, peers=[(1, 2)])
    assert "no layer of one of the KV-cache groups" in lonely.reasons[0]


# -- With the scheduler -----------------------------------------------------------------------------------------------


class Tier0(DictTier):
    """The first tier."""

    name = "t0"


class Readers:
    """A directed store over the ranks of an engine."""

    def __init__(self, ranks, num_peers, **settings):
        cls = type("Settings", (StoreSettings,), {"tiers": (Tier0,), "__module__": __name__})
        options = {"l1_size_per_rank": 1 << 20, "l2_timeout": 30.0, "l2_load_timeout": 30.0} | settings
        self.ranks = ranks
        self.store = DirectedStore(
            cls(**options),
            Stats(),
            num_slots=ranks[0].slab.num_slots,
            value_bytes=max(rank.slab.slot_bytes for rank in ranks) + HEADER_BYTES,
            num_ranks=len(ranks),
            num_peers=num_peers,
        )
        self.executors = [Executor([rank.client], rank.slab, rank.keys, peers=rank.peers) for rank in ranks]

    def settle(self):
        def step():
            commands = self.store.take_commands()
            for executor in self.executors:
                executor.execute(commands, self.store.epoch)
                self.store.answer(executor.take_answers(), executor.take_down())
            return not self.store.num_pending

        eventually(step)

    def load(self, *keys):
        """Bring blocks from L2, check what is in all slots, and return how many there are."""
        prefetch = self.store.prefetch(keys)
        self.settle()
        assert prefetch.over
        refs = self.store.pin_prefix(keys)
        for key, ref in zip(keys, refs, strict=False):
            for rank in self.ranks:
                found = rank.slab.view(ref.slot).tobytes()
                assert found == rank.expected(key)
        self.store.unpin(refs)
        self.settle()
        return len(refs)


@pytest.mark.parametrize("policy", ["all", "evicted"])
@pytest.mark.parametrize(("theirs", "ours"), [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((1, 2), (2, 1))])
def test_the_scheduler_asks_peers_after_all_tiers(start, theirs, ours, policy):
    """A prefetch finds what other engines have stored, in every rank's slots; nothing is written to the same tier."""
    values = {}
    for rank in start(Model(), theirs, values):
        rank.save(*KEYS[:3])
    before = dict(values)
    # Two kinds of engines: of the first, nothing is there.
    node = Readers(start(Model(), ours, values, peers=[(8, 1), theirs], tier=Tier0), 2, l2_write_policy=policy)
    assert node.load(*KEYS) == 3
    assert values == before
    for rank in node.ranks:
        assert rank.tier.calls["put"] == 0
        log = [(operation, len(names)) for operation, names in rank.tier.log]
        assert log[0] == ("exists", 4)  # its own names first
    assert node.store._writer._clients == node.store._director.clients[:1]
    # What is in L1 but in no tier is written under its own name, as ever, and found there first.
    if policy == "all":
        for rank in node.ranks:
            rank.paged.caches[0].gather([KEYS[3][0]], rank.slab, [9]).wait()
        (ref,) = node.store.reserve(KEYS[3:])
        for rank in node.ranks:
            rank.slab.view(ref.slot)[:] = rank.slab.view(9)
        node.store.publish([ref])
        node.settle()
        assert len(values) == len(before) + len(node.ranks)


def test_a_tier_in_front_gets_what_a_peer_has_in_one_behind_it():
    """A block that is in the second tier under another engine's name goes to the first, and to no other."""
    tiers = tuple(type(f"T{n}", (DictTier,), {"name": f"t{n}"}) for n in range(3))
    cls = type("Settings", (StoreSettings,), {"tiers": tiers, "__module__": __name__})
    settings = cls(l1_size_per_rank=1 << 20)
    store = DirectedStore(settings, Stats(), num_slots=8, value_bytes=64, num_ranks=1, num_peers=2)
    store.prefetch(KEYS[:1])
    seen = []
    while store.has_commands:
        for command in store.take_commands():
            seen.append((command.kind, command.tier))
            store.answer({command.number: (1, (command.kind != "exists" or command.tier == 7,))})
    assert seen == [*(("exists", number) for number in range(8)), ("get", 7), ("put", 0)]


def test_b3_a_rank_that_lacks_a_shard_ends_the_hit(start):
    """B3: one of two ranks can't have its part of a block: for both the hit ends there."""
    values = {}
    theirs = start(Model(), (4, 1), values)
    for rank in theirs:
        rank.save(*KEYS)
    del values[theirs[3].keys(KEYS[2])]
    node = Readers(start(Model(), (2, 1), values, peers=[(4, 1)], tier=Tier0), 1)
    assert node.load(*KEYS) == 2


def test_peers_that_arent_read_find_nothing(start):
    """The scheduler counts them all the same: what comes after them is found."""
    values = {}
    for rank in start(Model(heads=6), (2, 1), values):
        rank.save(*KEYS)
    node = Readers(start(Model(heads=6), (1, 1), values, peers=[(4, 1), (2, 1)], tier=Tier0), 2)
    assert node.load(*KEYS) == 4


def test_peers_arent_written_to(start):
    """A command to write to a peer is answered with nothing."""
    (ours,) = start(Model(), (1, 1), {}, peers=[(2, 1)])
    executor = Executor([ours.client], ours.slab, ours.keys, peers=ours.peers)
    executor.execute([Command(n, 0, 1, kind, (KEYS[0],), (0,)) for n, kind in enumerate(("put", "spill"))], 0)
    assert executor.take_answers() == {0: (1, (False,)), 1: (1, (False,))}
    assert executor.take_down() == frozenset()
    assert isinstance(ours, Rank)
    assert set(executor.gauges()) == {"l2_down:dict"}
    assert ours.tier.values == {}
