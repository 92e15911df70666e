"""Worker half, on CPU tensors, with copies that end when the test says so."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from tiers import DictTier, FaultyTier, eventually

from kvplug.paged import PagedCache
from kvplug.scheduled import worker as worker_module
from kvplug.scheduled.metadata import Load, Part, Save, StepMetadata
from kvplug.scheduled.worker import WorkerHalf
from kvplug.store.directed import Command
from support.scheduled_steps import BLOCK, groups, scheduled_settings

BLOCKS, WIDTH, SHORT = 24, 64, 0.05
PAGE = 2 * BLOCK * WIDTH * 4
LAYERS = ("layer.0", "layer.1", "layer.2")


@pytest.fixture(autouse=True)
def _warnings_come_again(monkeypatch):
    """Let warnings that come once a minute come in every test that provokes them."""
    monkeypatch.setattr(worker_module._limited, "_seen", {})


class Copies:
    """Lets copies wait, fail, and tell their order, by the name of the method: `gather` or `scatter`."""

    def __init__(self, monkeypatch):
        self.gates = {"gather": threading.Event(), "scatter": threading.Event()}
        for gate in self.gates.values():
            gate.set()
        self.errors = {}
        self.log = []
        self.begun = threading.Semaphore(0)
        for what in self.gates:
            monkeypatch.setattr(PagedCache, what, self._gated(what, getattr(PagedCache, what)))

    def _gated(self, what, inner):
        def copy(cache, *args, **options):
            self.begun.release()
            assert self.gates[what].wait(30)
            if what in self.errors:
                raise self.errors[what]
            self.log.append((what, cache.layers[0].name))
            return inner(cache, *args, **options)

        return copy

    @contextmanager
    def held(self, what):
        """Hold copies back."""
        self.gates[what].clear()
        try:
            yield
        finally:
            self.gates[what].set()


@pytest.fixture
def copies(monkeypatch):
    return Copies(monkeypatch)


class Engine:
    """A worker half around a paged cache, in which a block's content is one number."""

    def __init__(self, of=(), *tiers, slots=16, **settings):
        self.groups = of or groups()
        self.caches = {f"layer.{group.index}": torch.zeros(BLOCKS, 2, BLOCK, WIDTH) for group in self.groups}
        if len(self.groups) == 1:
            self.caches = {name: torch.zeros(BLOCKS, 2, BLOCK, WIDTH) for name in LAYERS}
        options = {name: settings.pop(name) for name in ("zeroes_early",) if name in settings}
        size = slots * (PAGE * (3 if len(self.groups) == 1 else 1) + 4096)
        self.worker = WorkerHalf(
            scheduled_settings(*tiers, **({"l1_size_per_rank": size} | settings)),
            groups=[_sized(group, self.caches) for group in self.groups],
            num_blocks=BLOCKS,
            shard="all" if tiers else "",
            rank=0,
            **options,
        )
        self.worker.register_kv_caches(self.caches)
        self.finished = []
        self.ended = {"loads": {}, "saves": {}, "answers": {}}

    def write(self, **numbers):
        """Let blocks (`b5=7`) have a number in all layers."""
        for block, number in numbers.items():
            for cache in self.caches.values():
                cache[int(block[1:])] = number

    def content(self, *blocks, layer=None):
        """Return the number in each block; all bytes, of all layers, must agree."""
        found = []
        for block in blocks:
            caches = [self.caches[layer]] if layer else self.caches.values()
            (number,) = {int(value) for cache in caches for value in cache[block].unique()}
            found.append(number)
        return found

    def step(self, metadata, compute=lambda: None):
        """Run a step as vLLM does, layer by layer, without waiting for what runs beside it."""
        self.worker.begin(metadata)
        self.worker.load(metadata)
        compute()
        self.worker.end(metadata)
        self.settle()

    def settle(self):
        """Take what vLLM takes after a step."""
        self.worker.settle()
        finished, failed = self.worker.take_finished()
        self.finished += finished
        if (report := self.worker.report()) is not None:
            for what in ("loads", "saves", "answers"):
                for number, said in getattr(report, what).items():
                    assert number not in self.ended[what], "reported twice"
                    self.ended[what][number] = said
        return finished, failed

    def until(self, what, number):
        """Step until a transfer has ended, and return what was said of it."""
        eventually(lambda: (self.settle(), number in self.ended[what])[1])
        return self.ended[what][number]


def _sized(group, caches):
    from dataclasses import replace

    names = caches if len(caches) == len(LAYERS) and group.index == 0 else [f"layer.{group.index}"]
    return replace(group, page_size_bytes=dict.fromkeys(names, PAGE))


def save(number, blocks, slots, group=0, name="s"):
    return Save(number, (Part(group, tuple(blocks), tuple(slots)),))


def load(number, blocks, slots, *, group=0, name="l", asynchronous=True, complete=True):
    return Load(number, name, (Part(group, tuple(blocks), tuple(slots)),), asynchronous, complete)


@pytest.fixture
def engine():
    """An engine whose slots 0 and 1 hold blocks with the numbers 10 and 20."""
    engine = Engine()
    engine.write(b1=10, b2=20)
    engine.step(StepMetadata(saves=(save(100, [1, 2], [0, 1]),)))
    engine.until("saves", 100)
    yield engine
    engine.worker.close()


# -- Loads and saves --------------------------------------------------------------------------------------------------


def test_what_was_saved_is_loaded_elsewhere(engine):
    """Blocks come back in other blocks of every layer; each transfer, and each request, is reported once."""
    engine.step(StepMetadata(loads=(load(1, [5, 6], [1, 0]),)))
    assert engine.until("loads", 1) == (1, False)
    assert engine.content(5, 6, 1, 2, 7) == [20, 10, 10, 20, 0]
    for _ in range(3):
        engine.settle()
    assert engine.finished == ["l"]
    assert engine.worker.stats.get("blocks_loaded") == engine.worker.stats.get("blocks_saved") == 2
    assert engine.worker.stats.get("loaded_bytes") == 2 * 3 * PAGE


def test_the_step_doesnt_wait_for_copies(engine, copies):
    """Steps go on while a load and a save are under way; their ends are reported by whichever step sees them."""
    with copies.held("gather"), copies.held("scatter"):
        engine.step(StepMetadata(loads=(load(1, [5], [0]),), saves=(save(2, [1], [3]),)))
        for _ in range(3):
            engine.step(StepMetadata(idle=True))
        assert engine.ended["loads"] == {}
        assert engine.finished == []
    assert engine.until("loads", 1) == engine.until("saves", 2) == (1, False)


def test_groups_have_blocks_of_their_own():
    """A save and a load of several groups: each group's blocks in its layers only."""
    engine = Engine(groups("full", ("window", BLOCK, 8)))
    engine.write(b1=10, b2=20)
    both = (Part(0, (1,), (0,)), Part(1, (2,), (1,)))
    engine.step(StepMetadata(saves=(Save(1, both),)))
    engine.until("saves", 1)
    engine.step(StepMetadata(loads=(Load(2, "l", (Part(0, (5,), (0,)), Part(1, (6,), (1,))), asynchronous=True),)))
    engine.until("loads", 2)
    assert engine.content(5, 6, layer="layer.0") == [10, 0]
    assert engine.content(5, 6, layer="layer.1") == [0, 20]
    engine.worker.close()


# -- Overwritten blocks -----------------------------------------------------------------------------------------------


def test_c1_c3_a_block_that_is_given_away_is_read_before(engine, copies):
    """C1, C3: its save is held up; the step that overwrites the block waits for it, and what is stored is the old."""
    engine.write(b3=30)
    began = threading.Event()
    with copies.held("gather"):
        engine.step(StepMetadata(saves=(save(1, [3], [5]),)))
        next_step = StepMetadata(overwritten=(1, 77))

        def overwrite():
            engine.worker.begin(next_step)
            began.set()
            engine.write(b3=99)

        thread = threading.Thread(target=overwrite)
        thread.start()
        assert not began.wait(SHORT)
    thread.join(30)
    assert engine.until("saves", 1) == (1, False)
    engine.step(StepMetadata(loads=(load(2, [8], [5]),)))
    engine.until("loads", 2)
    assert engine.content(3, 8) == [99, 30]
    assert len(engine.worker.stats.take()["overwrite_wait_seconds"]) == 1


def test_c1_without_overwritten_blocks_nobody_waits(engine, copies):
    """C1, C9: the same call of a step that overwrites nothing returns at once."""
    with copies.held("gather"):
        engine.step(StepMetadata(saves=(save(1, [3], [5]),)))
        engine.worker.begin(StepMetadata())


def test_c1_a_load_into_a_block_that_is_being_saved_waits(engine, copies):
    """C1: a block is given away to a request that loads: the load comes after the save; the step isn't held up."""
    engine.write(b3=30)
    with copies.held("gather"):
        engine.step(StepMetadata(saves=(save(1, [3], [5]),)))
        engine.step(StepMetadata(loads=(load(2, [3], [0]),)))
        threading.Event().wait(SHORT)
        assert engine.content(3) == [30]
    engine.until("loads", 2)
    assert engine.content(3) == [10]
    engine.step(StepMetadata(loads=(load(3, [8], [5]),)))
    engine.until("loads", 3)
    assert engine.content(8) == [30]


def test_c4_a_save_starts_after_the_step_that_computes_it(engine):
    """C4: what is stored is what the step has computed, not what was there when it began."""
    metadata = StepMetadata(saves=(save(1, [3], [5]),))
    engine.write(b3=1)
    engine.step(metadata, compute=lambda: engine.write(b3=2))
    engine.until("saves", 1)
    engine.step(StepMetadata(loads=(load(2, [8], [5]),)))
    engine.until("loads", 2)
    assert engine.content(8) == [2]


@pytest.mark.parametrize("options", [{"save_within_step": True}, {"zeroes_early": True}])
def test_saves_within_the_step(options, copies):
    """Where it is set, or the runner overwrites blocks before it tells: a step ends when its saves have."""
    engine = Engine(**options)
    engine.write(b3=30)
    metadata = StepMetadata(saves=(save(1, [3], [5]),))
    over = threading.Event()
    with copies.held("gather"):
        thread = threading.Thread(target=lambda: (engine.step(metadata), over.set()))
        thread.start()
        assert copies.begun.acquire(timeout=30)
        assert not over.wait(SHORT)
    assert over.wait(30)
    thread.join()
    assert engine.ended["saves"] == {1: (1, False)}
    engine.worker.close()


def test_begin_may_come_several_times_a_step(engine, monkeypatch):
    """The hook, vLLM's call and the binding of metadata all lead there: commands are carried out once."""
    executed = []
    monkeypatch.setattr(engine.worker._executor, "execute", lambda *arguments: executed.append(arguments))
    metadata = StepMetadata()
    for _ in range(3):
        engine.worker.begin(metadata)
    engine.worker.begin(StepMetadata(epoch=1))
    assert executed == [((), 0), ((), 1)]


# -- Failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(5, "EIO"), MemoryError(), RuntimeError("device")])
def test_a2_a6_a_failed_load_of_one_group_names_its_blocks_once(engine, copies, error):
    """A2, A6: whatever a copy raises, exactly that load's blocks are reported, once; the next load is right."""
    copies.errors["scatter"] = error
    engine.step(StepMetadata(loads=(load(1, [5, 6], [0, 1], name="bad"),)))
    assert engine.until("loads", 1) == (1, True)
    copies.errors.clear()
    engine.step(StepMetadata(loads=(load(2, [7], [1], name="good"),)))
    assert engine.until("loads", 2) == (1, False)
    assert engine.worker.take_failed_blocks() == {5, 6}
    assert engine.worker.take_failed_blocks() == set()
    assert engine.finished == ["bad", "good"]
    assert engine.worker.stats.get("load_errors") == 1
    assert engine.content(7) == [20]


def test_a2_two_requests_with_the_same_bad_slot(engine, copies):
    """A2: both requests' blocks are reported, each once."""
    copies.errors["scatter"] = OSError(5, "EIO")
    engine.step(StepMetadata(loads=(load(1, [5], [0], name="one"), load(2, [6], [0], name="two"))))
    assert engine.until("loads", 1) == engine.until("loads", 2) == (1, True)
    assert engine.worker.take_failed_blocks() == {5, 6}
    assert sorted(engine.finished) == ["one", "two"]


@pytest.mark.parametrize("of", [groups("full", ("window", BLOCK, 8)), groups(("window", BLOCK, 8)), groups("state")])
def test_a3_a_failed_load_of_other_than_full_attention_names_the_request(of, copies):
    """A3: block ids can't say it there; the request is reported as finished and as failed."""
    engine = Engine(of)
    copies.errors["scatter"] = OSError(5, "EIO")
    engine.worker.begin(metadata := StepMetadata(loads=(load(1, [5], [0], name="bad"),)))
    engine.worker.load(metadata)
    eventually(lambda: (engine.worker.settle(), engine.worker._finished)[1])
    assert engine.worker.take_finished() == ({"bad"}, {"bad"})
    assert engine.worker.take_finished() == (set(), set())
    assert engine.worker.take_failed_blocks() == set()
    engine.worker.close()


def test_a6_an_incomplete_load_fails(engine):
    """A6: a load whose blocks aren't all promised fails as a whole."""
    engine.step(StepMetadata(loads=(load(1, [5], [0], complete=False),)))
    assert engine.until("loads", 1) == (1, True)
    assert engine.worker.take_failed_blocks() == {5}


def test_a6_a_load_that_cant_be_started(engine):
    """A6: slots or blocks that don't exist: the load has failed, and the step goes on."""
    engine.step(StepMetadata(loads=(load(1, [5], [999]),)))
    assert engine.until("loads", 1) == (1, True)
    assert engine.worker.take_failed_blocks() == {5}


def test_a7_a_failed_save_is_a_later_miss(engine, copies):
    """A7: whatever saving raises, the step goes on, the save is reported as failed, and it is counted."""
    copies.errors["gather"] = MemoryError()
    engine.step(StepMetadata(saves=(save(1, [3], [5]),)))
    assert engine.until("saves", 1) == (1, True)
    assert engine.worker.stats.get("save_errors") == 1
    copies.errors.clear()
    engine.step(StepMetadata(saves=(save(2, [3], [5]),)))
    assert engine.until("saves", 2) == (1, False)


def test_a_load_after_a_failed_save_of_its_block(engine, copies):
    """The save doesn't read any more, so the load goes ahead."""
    copies.errors["gather"] = OSError(5, "EIO")
    engine.step(StepMetadata(saves=(save(1, [3], [5]),), loads=()))
    engine.step(StepMetadata(loads=(load(2, [3], [1]),), overwritten=(1,)))
    assert engine.until("loads", 2) == (1, False)
    assert engine.content(3) == [20]


def test_c14_metadata_names_each_steps_requests_only(engine):
    """C14: requests of an earlier step needn't be in the next one's metadata; what is left of them ends."""
    engine.write(b3=30, b4=40)
    engine.step(StepMetadata(saves=(save(1, [3], [5], name="a"), save(2, [4], [6], name="b"))))
    engine.step(StepMetadata(saves=(save(3, [4], [7], name="b"),)))
    engine.step(StepMetadata())
    for number in (1, 2, 3):
        engine.until("saves", number)
    assert not engine.worker._saves


# -- Layer by layer ---------------------------------------------------------------------------------------------------


@pytest.fixture
def layered():
    """An engine that transfers layer by layer, with two saved blocks."""
    engine = Engine(transfer="layerwise")
    engine.write(b1=10, b2=20)
    engine.step(StepMetadata(saves=(save(100, [1, 2], [0, 1]),)))
    engine.until("saves", 100)
    yield engine
    engine.worker.close()


def test_layers_are_loaded_in_order_and_waited_for_one_by_one(layered, copies):
    """A layer waits for its own blocks only, which come before the next layer's."""
    passed = []
    metadata = StepMetadata(loads=(load(1, [5], [0], asynchronous=False),))
    with copies.held("scatter"):
        layered.worker.begin(metadata)
        layered.worker.load(metadata)

        def compute():
            for name in LAYERS:
                layered.worker.wait_for_layer(name)
                passed.append(layered.content(5, layer=name))

        thread = threading.Thread(target=compute)
        thread.start()
        threading.Event().wait(SHORT)
        assert passed == []
    thread.join(30)
    assert passed == [[10]] * 3
    assert copies.log == [("scatter", name) for name in LAYERS]
    layered.worker.end(metadata)
    assert layered.until("loads", 1) == (1, False)
    assert layered.finished == []


def test_a_layer_doesnt_wait_for_later_ones(layered, monkeypatch):
    """The first layer's compute starts while the others are still on their way."""
    rest = threading.Event()
    inner = PagedCache.scatter

    def scatter(cache, *arguments, **options):
        if cache.layers[0].name != LAYERS[0]:
            assert rest.wait(30)
        return inner(cache, *arguments, **options)

    monkeypatch.setattr(PagedCache, "scatter", scatter)
    metadata = StepMetadata(loads=(load(1, [5], [0], asynchronous=False),))
    layered.worker.begin(metadata)
    layered.worker.load(metadata)
    layered.worker.wait_for_layer(LAYERS[0])
    assert layered.content(5, layer=LAYERS[0]) == [10]
    assert layered.content(5, layer=LAYERS[2]) == [0]
    rest.set()
    layered.worker.end(metadata)  # nobody asked for the others: the step ends with them all the same
    assert layered.content(5) == [10]


def test_a_layer_is_saved_when_it_is_computed(layered):
    """Layers are saved one by one; what comes of them later in the step isn't in the save. A second call is ignored."""
    metadata = StepMetadata(saves=(save(1, [3], [5]),))
    layered.worker.begin(metadata)
    layered.caches[LAYERS[0]][3] = 7
    layered.worker.save_layer(LAYERS[0])
    eventually(lambda: all(t.done() for t in layered.worker._layers._saved[1]))
    layered.caches[LAYERS[0]][3] = 8
    layered.worker.save_layer(LAYERS[0])
    layered.worker.save_layer("a layer that shares another's cache")
    layered.caches[LAYERS[1]][3] = layered.caches[LAYERS[2]][3] = 7
    layered.worker.end(metadata)
    assert layered.until("saves", 1) == (1, False)
    layered.step(StepMetadata(loads=(load(2, [8], [5], asynchronous=False),)))
    assert layered.content(8) == [7]


def test_e8_layers_without_a_hook_are_saved_at_the_end(layered):
    """E8: draft layers, or ones for which vLLM doesn't call, are saved when the step ends, which is after drafting."""
    metadata = StepMetadata(saves=(save(1, [3], [5]),))
    layered.worker.begin(metadata)
    for name in LAYERS[:2]:
        layered.caches[name][3] = 7
        layered.worker.save_layer(name)
    layered.caches[LAYERS[2]][3] = 7
    layered.worker.end(metadata)
    layered.until("saves", 1)
    layered.step(StepMetadata(loads=(load(2, [8], [5], asynchronous=False),)))
    assert layered.content(8) == [7]


def test_a1_a_layers_failed_load_is_reported(layered, copies):
    """A1: a synchronous load that fails: layers go on, and the blocks are reported when the step ends, once."""
    copies.errors["scatter"] = OSError(5, "EIO")
    metadata = StepMetadata(loads=(load(1, [5, 6], [0, 1], asynchronous=False),))
    layered.worker.begin(metadata)
    layered.worker.load(metadata)
    for name in LAYERS:
        layered.worker.wait_for_layer(name)
    layered.worker.end(metadata)
    assert layered.until("loads", 1) == (1, True)
    assert layered.worker.take_failed_blocks() == {5, 6}
    assert layered.finished == []


def test_c1_a_synchronous_load_waits_for_the_save_of_its_block(layered, copies):
    """C1: where blocks that are still being saved are loaded into in the same step: not before they are read."""
    layered.write(b3=30)
    with copies.held("gather"):
        layered.step(StepMetadata(saves=(save(1, [3], [5]),)))
        threading.Timer(SHORT, copies.gates["gather"].set).start()
        metadata = StepMetadata(loads=(load(2, [3], [0], asynchronous=False),))
        layered.step(metadata)
    assert layered.content(3) == [10]
    layered.step(StepMetadata(loads=(load(3, [8], [5], asynchronous=False),)))
    assert layered.content(8) == [30]


# -- L2 ---------------------------------------------------------------------------------------------------------------


def command(number, kind, keys, slots=(), epoch=0):
    return Command(number, epoch, 0, kind, tuple(bytes([key]) * 32 for key in keys), tuple(slots))


@pytest.fixture
def shared(monkeypatch):
    """Tiers over one dict; an engine with one."""
    tier = FaultyTier()
    monkeypatch.setattr("kvplug.store.tiered.make._make", lambda *_: tier)
    engine = Engine((), DictTier)
    yield engine, tier
    tier.going.set()
    engine.worker.close()


def test_commands_are_carried_out_and_answered_once(shared):
    """Put, exists and get of slots: what a slot held comes back in another."""
    engine, _ = shared
    engine.write(b1=10)
    engine.step(StepMetadata(saves=(save(1, [1], [0]),)))
    engine.until("saves", 1)
    engine.step(StepMetadata(commands=(command(1, "put", [1], [0]),)))
    assert engine.until("answers", 1) == (1, (True,))
    engine.step(StepMetadata(commands=(command(2, "exists", [1, 2]),)))
    assert engine.until("answers", 2) == (1, (True, False))
    engine.step(StepMetadata(commands=(command(3, "get", [1, 2], [3, 4]),)))
    assert engine.until("answers", 3) == (1, (True, False))
    engine.step(StepMetadata(loads=(load(2, [5], [3]),)))
    engine.until("loads", 2)
    assert engine.content(5) == [10]


def test_spilled_blocks_are_copied_before_their_slots_are_written(shared):
    """What is evicted goes to L2 as it was, however late the tier is and whatever the step writes to the slot."""
    engine, tier = shared
    engine.write(b1=10, b2=20)
    engine.step(StepMetadata(saves=(save(1, [1], [0]),)))
    engine.until("saves", 1)
    tier.going.clear()
    engine.step(StepMetadata(commands=(command(1, "spill", [1], [0]),), saves=(save(2, [2], [0]),)))
    engine.until("saves", 2)
    tier.going.set()
    assert engine.until("answers", 1) == (1, (True,))
    engine.step(StepMetadata(commands=(command(2, "get", [1], [3]),)))
    engine.until("answers", 2)
    engine.step(StepMetadata(loads=(load(3, [5, 6], [3, 0]),)))
    engine.until("loads", 3)
    assert engine.content(5, 6) == [10, 20]


def test_d9_commands_from_before_a_reset_are_not_carried_out(shared):
    """D9: they are answered with nothing, and what L2 had is left behind."""
    engine, tier = shared
    engine.write(b1=10)
    engine.step(StepMetadata(saves=(save(1, [1], [0]),)))
    engine.until("saves", 1)
    engine.step(StepMetadata(commands=(command(1, "put", [1], [0]),)))
    engine.until("answers", 1)
    calls = tier.calls["put"]
    engine.step(StepMetadata(commands=(command(2, "put", [2], [0]), command(3, "exists", [1], epoch=1)), epoch=1))
    assert engine.until("answers", 2) == (1, (False,))
    assert engine.until("answers", 3) == (1, (False,))
    assert tier.calls["put"] == calls


@pytest.mark.parametrize("error", [OSError(28, "ENOSPC"), ConnectionError(), MemoryError()])
def test_a7_a_tier_that_raises_is_a_miss(shared, error):
    """A7: whatever a tier raises, all commands are answered with nothing, and steps go on."""
    engine, tier = shared
    tier.error = error
    for number, kind in enumerate(("put", "exists", "get")):
        slots = () if kind == "exists" else (0,)
        engine.step(StepMetadata(commands=(command(number, kind, [1], slots),)))
        assert engine.until("answers", number) == (1, ()), "as if it wasn't asked"
    tier.error = None


def test_a_command_that_cant_be_started_is_answered(shared, monkeypatch):
    """A bug in a client costs the command's hits only."""
    engine, _ = shared
    monkeypatch.setattr(engine.worker._executor._clients[0], "exists", None)
    engine.step(StepMetadata(commands=(command(1, "exists", [1]),)))
    assert engine.until("answers", 1) == (1, (False,))


# -- Start and end ----------------------------------------------------------------------------------------------------


def test_the_slab_is_told_with_the_first_report(engine):
    """Once, so that a scheduler half that wasn't told at the start knows; and it is what the handshake says."""
    other = Engine()
    first = other.worker.report()
    assert first.slab == other.worker.slab()
    assert other.worker.report() is None
    assert other.worker.slab().value_bytes == 3 * PAGE
    other.worker.close()


def test_before_and_after_its_life_a_worker_does_nothing():
    """Without a paged cache, and after the end, calls are taken and do nothing."""
    worker = WorkerHalf(scheduled_settings(), groups=groups(), num_blocks=BLOCKS, shard="", rank=0)
    worker.begin(StepMetadata())
    worker.wait_for_layer("layer.0")
    worker.save_layer("layer.0")
    worker.settle()
    assert (worker.slab(), worker.report(), worker.gauges()) == (None, None, {})
    worker.close()
    worker.close()


def test_close_waits_for_what_is_under_way(engine, copies):
    """A save that is being copied when the worker closes reads memory that is still there."""
    with copies.held("gather"):
        engine.step(StepMetadata(saves=(save(1, [1], [3]),)))
        assert copies.begun.acquire(timeout=30)
        threading.Timer(SHORT, copies.gates["gather"].set).start()
        engine.worker.close()
    assert copies.log[-1] == ("gather", LAYERS[0])


def test_a_second_engine_in_the_process_is_refused(engine):
    """Both would have the first one's connector."""
    from kvplug.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="two engines in one process"):
        engine.worker.register_kv_caches(engine.caches)


def test_an_idle_step_waits_a_moment(engine, copies, monkeypatch):
    """Nothing is computed: the step waits for something to end, so that an idle engine doesn't spin."""
    waited = []
    monkeypatch.setattr(engine.worker._progress, "wait", waited.append)
    engine.step(StepMetadata(idle=True))
    assert waited == []
    with copies.held("gather"):
        engine.step(StepMetadata(saves=(save(1, [1], [3]),)))
        assert waited == []
        engine.step(StepMetadata(idle=True))
        assert len(waited) == 1
