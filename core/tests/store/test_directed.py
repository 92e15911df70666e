"""A store whose bookkeeping is the scheduler's and whose memory is the workers': commands, answers, and both."""

from __future__ import annotations

import threading

import pytest
from tiers import DictTier, FaultyTier, eventually, fill, make_client

from kvplug.stats import Stats
from kvplug.store import Slab
from kvplug.store.directed import Command, DirectedStore, Executor
from kvplug.store.directed.director import Director
from kvplug.store.l2.breaker import Breaker
from kvplug.store.l2.keys import StorageKeys
from kvplug.store.l2.value import HEADER_BYTES
from kvplug.store.settings import StoreSettings

BLOCK = 8192
KEYS = [bytes([number]) * 32 for number in range(64)]


def settings_with(*tiers, **settings):
    cls = type("Settings", (StoreSettings,), {"tiers": tiers, "__module__": __name__})
    return cls(**({"l1_size_per_rank": 1 << 20, "l2_timeout": 30.0, "l2_load_timeout": 30.0} | settings))


class Ranks:
    """A directed store, and the executors of its workers, each over a tier of its own (ranks store different bytes)."""

    def __init__(self, *, ranks=1, slots=32, tiers=1, faulty=False, values=None, **settings):
        kinds = tuple(type(f"T{n}", (FaultyTier if faulty else DictTier,), {"name": f"t{n}"}) for n in range(tiers))
        self.stats = Stats()
        self.store = DirectedStore(
            settings_with(*kinds, **settings),
            self.stats,
            num_slots=slots,
            value_bytes=BLOCK + HEADER_BYTES,
            num_ranks=ranks,
        )
        self.slabs = [Slab(slots, BLOCK, header_bytes=HEADER_BYTES) for _ in range(ranks)]
        self.values = values or [[{} for _ in kinds] for _ in range(ranks)]
        self.tiers, self.executors = [], []
        for rank, slab in enumerate(self.slabs):
            names = StorageKeys(f"rank {rank}")
            mine = [kind(kept) for kind, kept in zip(kinds, self.values[rank], strict=True)]
            clients = [make_client(tier, slab, keys=names, breaker=Breaker(failures=1000)) for tier in mine]
            for client in clients:
                client.start()
            self.tiers.append(mine)
            self.executors.append(Executor(clients, slab, names))

    def save(self, *keys):
        """Save blocks in all ranks: spills are copied before slots are written, as in a step."""
        refs = self.store.reserve(keys)
        self.send()
        for key, ref in zip(keys, refs, strict=True):
            if ref is not None:
                for rank, slab in enumerate(self.slabs):
                    fill(slab, ref.slot, key[0] + rank)
        self.store.publish([ref for ref in refs if ref is not None])
        self.settle()

    def send(self):
        """Give a step's commands to all ranks."""
        commands = self.store.take_commands()
        for executor in self.executors:
            executor.execute(commands, self.store.epoch)

    def hear(self):
        for executor in self.executors:
            self.store.answer(executor.take_answers())

    def settle(self):
        """Step until there is nothing to tell and nothing to hear."""
        self.send()
        eventually(lambda: (self.hear(), self.send(), not self.store.num_pending)[2])

    def load(self, *keys):
        """Pin blocks, check what is in every rank's slots, and return how many there were."""
        refs = self.store.pin_prefix(keys)
        for key, ref in zip(keys, refs, strict=False):
            for rank, slab in enumerate(self.slabs):
                expected = bytes(((key[0] + rank) * 37 + index * 11) & 0xFF for index in range(BLOCK))
                assert slab.view(ref.slot).tobytes() == expected
        self.store.unpin(refs)
        return len(refs)

    def forget(self, *keys):
        """Let L1 lose blocks."""
        self.store.allocator.discard(keys)

    def in_tier(self, rank=0, number=0):
        return {name[:32] for name in self.values[rank][number]}

    def close(self):
        for mine in self.tiers:
            for tier in mine:
                if isinstance(tier, FaultyTier):
                    tier.going.set()
                    tier.error = None
        self.settle()
        for executor in self.executors:
            executor.close()
        allocator = self.store.allocator
        assert sum(allocator._pins) + sum(state == 1 for state in allocator._state) == 0


@pytest.fixture
def ranks():
    made = []

    def make(**options):
        made.append(Ranks(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


# -- The director -----------------------------------------------------------------------------------------------------


@pytest.fixture
def director():
    return Director([DictTier], 2)


def test_b3_a_block_is_there_if_it_is_for_every_rank(director):
    """B3: answers of ranks, one by one or merged, are added up; what the caller hears is what all have, once."""
    heard = []
    director.clients[0].exists(KEYS[:3], released=heard.append)
    (command,) = director.take()
    assert director.take() == ()
    director.answer({command.number: (1, (True, True, False))})
    assert heard == []
    assert director.num_pending == 1
    director.answer({command.number: (1, (True, False, True)), 99: (1, (True,))})
    assert heard == [[True, False, False]]
    director.answer({command.number: (2, (True, True, True))})
    assert len(heard) == 1
    merged = []
    director.clients[0].exists(KEYS[:1], released=merged.append)
    (command,) = director.take()
    director.answer({command.number: (2, (True,))})
    assert merged == [[True]]


def test_what_wasnt_sent_can_be_cancelled(director):
    """A call that no step has taken is dropped, and its caller hears that nothing was done; one that was sent isn't."""
    heard = []
    client = director.clients[0]
    sent = client.get(KEYS[:1], [0], released=heard.append)
    (command,) = director.take()
    unsent = client.get(KEYS[:1], [1], released=heard.append)
    client.cancel([sent, unsent])
    assert heard == [None]
    assert director.take() == ()
    director.answer({command.number: (2, (True,))})
    assert heard == [None, [True]]


def test_calls_become_commands(director):
    """Kind, keys, slots, tier, urgency and epoch are all in the command."""
    client = director.clients[0]
    director.epoch = 3
    client.exists(KEYS[:1], urgent=False)
    late = client.get(KEYS[:1], [4], urgent=False)
    client.hasten(late)
    client.put(KEYS[:1], [5])
    client.put_values(KEYS[:1], [6])
    assert director.has_unsent
    assert director.take() == (
        Command(0, 3, 0, "exists", (KEYS[0],)),
        Command(1, 3, 0, "get", (KEYS[0],), (4,), urgent=True),
        Command(2, 3, 0, "put", (KEYS[0],), (5,)),
        Command(3, 3, 0, "spill", (KEYS[0],), (6,)),
    )
    assert not director.has_unsent
    client.hasten(late)  # too late


def test_a_tier_that_some_rank_leaves_alone_doesnt_work(director):
    """By its name."""
    health = director.clients[0].health
    assert health.works()
    director.down = frozenset({"dict"})
    assert not health.works()


# -- The executor -----------------------------------------------------------------------------------------------------


def test_d9_old_commands_are_answered_with_nothing(ranks):
    """D9: a command from before a reset isn't carried out, whichever comes first; what tiers have is left behind."""
    node = ranks()
    node.save(*KEYS[:2])
    executor, tier = node.executors[0], node.tiers[0][0]
    tier.calls.clear()
    old = Command(90, 0, 0, "put", (KEYS[5],), (0,))
    new = Command(91, 1, 0, "exists", (KEYS[0],))
    executor.execute([old, new], 1)
    answers = {}
    eventually(lambda: (answers.update(executor.take_answers()), len(answers) == 2)[1])
    assert answers == {90: (1, (False,)), 91: (1, (False,))}
    assert tier.calls["put"] == 0


def test_answers_are_told_and_notified(ranks):
    """Each once, with a call for each on any thread."""
    node = ranks()
    told = []
    executor = node.executors[0]
    executor._notify = lambda: told.append(1)
    executor.execute([Command(1, 0, 0, "exists", (KEYS[0],)), Command(2, 0, 7, "exists", (KEYS[0],))], 0)
    eventually(lambda: len(told) == 2)
    assert executor.take_answers() == {1: (1, (False,)), 2: (1, (False,))}  # there is no tier 7
    assert executor.take_answers() == {}


def test_tiers_that_fail_are_told_when_that_changes(ranks, monkeypatch):
    """The names of those that this rank leaves alone: at first, and whenever they are others."""
    node = ranks(faulty=True)
    executor = node.executors[0]
    assert executor.take_down() == frozenset()
    assert executor.take_down() is None
    with monkeypatch.context() as patch:
        patch.setattr(executor._clients[0].health, "works", lambda: False)
        assert executor.take_down() == frozenset({"t0"})
        assert executor.take_down() is None
    assert executor.take_down() == frozenset()


# -- Both together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_l1_lost_comes_back_from_l2(ranks, number):
    """Saved, written, lost, looked up, read: every rank has its own bytes in the same slot."""
    node = ranks(ranks=number)
    node.save(*KEYS[:6])
    assert [node.in_tier(rank) for rank in range(number)] == [set(KEYS[:6])] * number
    node.forget(*KEYS[:6])
    prefetch = node.store.prefetch(KEYS[:8])
    assert node.store.has_commands
    assert not prefetch.over
    node.settle()
    assert prefetch.over
    assert prefetch.tiers == {"t0"}
    assert node.load(*KEYS[:8]) == 6


def test_b3_b4_a_rank_that_has_lost_a_block_ends_the_hit(ranks):
    """B3, B4: one rank's copy of a block is gone from its tier: for all ranks the hit ends there."""
    node = ranks(ranks=2)
    node.save(*KEYS[:6])
    node.forget(*KEYS[:6])
    for name in [name for name in node.values[1][0] if name.startswith(KEYS[3])]:
        del node.values[1][0][name]
    node.store.prefetch(KEYS[:6])
    node.settle()
    assert node.load(*KEYS[:6]) == 3


def test_b3_a_rank_that_raises_is_a_miss_for_all(ranks):
    """B3: nothing is found while one rank's tier fails, and all is when it works again."""
    node = ranks(ranks=2, faulty=True)
    node.save(*KEYS[:4])
    node.forget(*KEYS[:4])
    node.tiers[1][0].error = OSError(5, "EIO")
    node.store.prefetch(KEYS[:4])
    node.settle()
    assert node.load(*KEYS[:4]) == 0
    node.tiers[1][0].error = None
    node.store.prefetch(KEYS[:4])
    node.settle()
    assert node.load(*KEYS[:4]) == 4


def test_a8_a_torn_value_of_one_rank_is_a_gap(ranks):
    """A8: a value that one rank can't read isn't loaded by any, and its slot is given back."""
    node = ranks(ranks=2)
    node.save(*KEYS[:4])
    node.forget(*KEYS[:4])
    values = node.values[0][0]
    name = next(name for name in values if name.startswith(KEYS[2]))
    values[name] = values[name][:-1] + bytes([values[name][-1] ^ 1])
    node.store.prefetch(KEYS[:4])
    node.settle()
    assert node.load(*KEYS[:4]) == 2


def test_policy_hits_writes_what_is_used_again(ranks):
    """Blocks go to the tier when they have been pinned so often, and only those."""
    node = ranks(l2_write_policy="hits", l2_write_min_hits=2)
    node.save(*KEYS[:6])
    node.load(*KEYS[:4])
    node.settle()
    assert node.in_tier() == set()
    node.load(*KEYS[:2])
    node.settle()
    assert node.in_tier() == set(KEYS[:2])


@pytest.mark.parametrize("number", [1, 2])
def test_policy_evicted_writes_what_l1_loses(ranks, number):
    """Blocks go to the tier when L1 evicts them, as they were, though their slots are written at once."""
    node = ranks(ranks=number, slots=8, l2_write_policy="evicted")
    node.save(*KEYS[:8])
    assert node.in_tier() == set()
    for start in range(8, 24, 2):
        node.save(*KEYS[start : start + 2])
    assert [node.in_tier(rank) for rank in range(number)] == [set(KEYS[:16])] * number
    node.store.prefetch(KEYS[:2])
    node.settle()
    assert node.load(*KEYS[:2]) == 2


def test_several_tiers_are_asked_in_order(ranks):
    """The second only for what the first doesn't have; a prefetch tells from which tiers something came."""
    node = ranks(tiers=2)
    node.save(*KEYS[:4])
    node.forget(*KEYS[:4])
    for name in [name for name in node.values[0][0] if not name.startswith(KEYS[0])]:
        del node.values[0][0][name]
    prefetch = node.store.prefetch(KEYS[:4])
    node.settle()
    assert node.load(*KEYS[:4]) == 4
    assert prefetch.tiers == {"t0", "t1"}


@pytest.mark.parametrize("sent", [False, True])
def test_d9_a_reset_forgets_l1_and_l2(ranks, sent):
    """D9: nothing of before is found, nor comes back by what is under way; what is saved afterwards is found again.

    Slots that workers may still write to aren't free yet.
    """
    node = ranks()
    node.save(*KEYS[:4])
    node.forget(*KEYS[:2])
    node.store.prefetch(KEYS[:2])
    node.send()
    eventually(lambda: (node.hear(), node.store.has_commands)[1])  # what is to be read now is from before
    if sent:
        commands = node.store.take_commands()
        assert node.store.clear() is False
        node.executors[0].execute(commands, 0)
    else:
        assert node.store.clear() is True
    node.settle()
    assert node.store.allocator.used == 0
    assert node.load(*KEYS[:4]) == 0
    node.store.prefetch(KEYS[:4])
    node.settle()
    assert node.load(*KEYS[:4]) == 0
    node.save(KEYS[0])
    node.forget(KEYS[0])
    node.store.prefetch(KEYS[:1])
    node.settle()
    assert node.load(KEYS[0]) == 1


def test_what_is_coming(ranks):
    """A block that is being saved, or read from L2, will be there soon; one that has been read for too long won't."""
    node = ranks(l2_timeout=30.0)
    (ref,) = node.store.reserve(KEYS[:1])
    assert node.store.is_coming(KEYS[0])
    node.store.abandon([ref])
    assert not node.store.is_coming(KEYS[0])
    node.save(*KEYS[:2])
    assert not node.store.is_coming(KEYS[0])
    node.forget(*KEYS[:2])
    node.store.prefetch(KEYS[:2])
    assert not node.store.is_coming(KEYS[0])  # it isn't known yet whether any tier has it
    node.send()
    eventually(lambda: (node.hear(), node.store.has_commands)[1])
    assert node.store.is_coming(KEYS[0])
    node.store._max_age = 0.0
    assert not node.store.is_coming(KEYS[0])
    node.settle()
    assert node.load(*KEYS[:2]) == 2


def test_without_tiers_there_is_only_l1(ranks):
    """No commands, and a prefetch is over at once."""
    node = ranks(tiers=0)
    node.save(*KEYS[:4])
    assert not node.store.has_l2
    assert node.load(*KEYS[:4]) == 4
    assert node.store.prefetch(KEYS[:8]).over
    assert node.store.prefetch(KEYS[:8], only_last=True).over
    assert node.store.take_commands() == ()


# -- Only the last block ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [[], [0], [0, 3], [2, 5], [5], [0, 1, 2, 3, 4, 5]])
def test_only_the_last_that_a_tier_has(ranks, there):
    """Of a recurrent state only the last block is of use: that one is read, and no other."""
    node = ranks()
    if there:
        node.save(*(KEYS[number] for number in there))
        node.forget(*KEYS[:6])
    prefetch = node.store.prefetch(KEYS[:6], only_last=True)
    node.settle()
    assert prefetch.over
    found = [number for number in range(6) if node.store.allocator.prefix_length([KEYS[number]])]
    assert found == there[-1:]
    assert prefetch.tiers == ({"t0"} if there else set())


def test_only_what_comes_after_the_last_that_is_here_is_better(ranks):
    """Blocks before one that L1 has aren't asked for; if it has the very last, nothing is."""
    node = ranks()
    node.save(*KEYS[:6])
    node.forget(KEYS[5], KEYS[1])
    node.store.prefetch(KEYS[:6], only_last=True)
    (command,) = node.store.take_commands()
    assert (command.kind, command.keys) == ("exists", (KEYS[5],))
    for executor in node.executors:
        executor.execute([command], 0)
    node.settle()
    assert node.store.prefetch(KEYS[:6], only_last=True).over
    assert not node.store.has_commands


def test_prefetches_have_a_budget_of_a_quarter(ranks):
    """So many blocks of L1 are on their way at most; the rest is left out and counted, and the budget comes back."""
    node = ranks(slots=16)
    for start in range(0, 8, 2):
        node.save(*KEYS[start : start + 2])
    node.forget(*KEYS[:8])
    first, second = node.store.prefetch(KEYS[:8]), node.store.prefetch(KEYS[20:22])
    assert second.over
    assert node.stats.get("l2_prefetches_dropped") == 4 + 2
    node.settle()
    assert first.over
    assert node.load(*KEYS[:8]) == 4
    node.store.prefetch(KEYS[:8])
    node.settle()
    assert node.load(*KEYS[:8]) == 8


def test_i5_where_no_slot_can_be_had_nothing_comes(ranks):
    """I5: all slots are pinned: a prefetch ends with nothing, and nothing fails."""
    node = ranks(slots=4)
    node.save(*KEYS[:2])
    node.forget(*KEYS[:2])
    node.save(*KEYS[10:14])
    pinned = node.store.pin_prefix(KEYS[10:14])
    prefetch = node.store.prefetch(KEYS[:2], only_last=True)
    node.settle()
    assert prefetch.over
    assert node.load(*KEYS[:2]) == 0
    node.store.unpin(pinned)


# -- Writes that wait for a save of the same step ----------------------------------------------------------------------


class Copy:
    """A transfer that ends when it is told to, by filling slots or by raising."""

    def __init__(self, filling=lambda: None, error=None):
        self.filling, self.error = filling, error
        self.going, self.waited = threading.Event(), threading.Event()

    def wait(self):
        self.waited.set()
        assert self.going.wait(30)
        if self.error is not None:
            raise self.error
        self.filling()

    def go(self):
        self.going.set()
        return self


def started_save(node, *keys, save=7):
    """Reserve slots, and send the commands that write them after a save; return the references."""
    refs = node.store.reserve(keys)
    node.store.write_after(save, refs)
    node.send()
    return refs


def fills(node, keys, refs, rank=0):
    """Return what a save does in one rank."""

    def fill_all():
        for key, ref in zip(keys, refs, strict=True):
            fill(node.slabs[rank], ref.slot, key[0] + rank)

    return fill_all


@pytest.mark.parametrize("number", [1, 2])
def test_a_put_waits_for_its_save(ranks, number):
    """Sent before the blocks are there, it is made when the save has started, and reads when all of it has ended."""
    node = ranks(ranks=number)
    keys = KEYS[:4]
    refs = started_save(node, *keys)
    assert [tier.calls["put"] for (tier,) in node.tiers] == [0] * number
    copies = []
    for rank, executor in enumerate(node.executors):
        copies.append((Copy().go(), Copy(fills(node, keys, refs, rank))))
        executor.started(6, (Copy(error=OSError()).go(),), failed=False)  # another save
        executor.started(7, copies[-1], failed=False)
    for _, last in copies:
        assert last.waited.wait(30)
    assert [tier.calls["put"] for (tier,) in node.tiers] == [0] * number
    for _, last in copies:
        last.go()
    node.settle()
    node.store.publish(refs)
    node.settle()
    assert [node.in_tier(rank) for rank in range(number)] == [set(keys)] * number
    assert all(tier.calls["put"] == len(tier.log) for (tier,) in node.tiers)
    node.forget(*keys)
    node.store.prefetch(keys)
    node.settle()
    assert node.load(*keys) == 4


def taken(executor, number):
    """Return the answers of so many commands, when they have come."""
    answers = {}
    eventually(lambda: (answers.update(executor.take_answers()), len(answers) >= number)[1])
    return answers


def test_a_put_of_a_save_that_has_failed_is_answered_with_nothing(ranks):
    """The scheduler's side hears of it, and nothing is written, nor waited for."""
    node = ranks()
    executor, (tier,) = node.executors[0], node.tiers[0]
    executor.execute([Command(1, 0, 0, "put", KEYS[:2], (0, 1), after=7)], 0)
    assert executor.take_answers() == {}
    executor.started(7, (Copy(error=OSError()),), failed=True)
    assert executor.take_answers() == {1: (1, ())}
    assert tier.calls["put"] == 0
    executor.started(7, (), failed=False)  # once
    assert executor.take_answers() == {}


@pytest.mark.parametrize("place", [0, 1])
def test_a_put_of_a_transfer_that_raises_is_answered_with_nothing(ranks, place):
    """Whichever of a save's transfers it is; and the tier isn't blamed."""
    node = ranks()
    executor, (tier,) = node.executors[0], node.tiers[0]
    executor._clients[0].health.breaker = breaker = Breaker(failures=1, first=1000)
    breaker.succeeded()
    copies = [Copy().go(), Copy().go()]
    copies[place].error = RuntimeError("CUDA error")
    executor.execute([Command(1, 0, 0, "put", KEYS[:2], (0, 1), after=7)], 0)
    executor.started(7, copies, failed=False)
    assert taken(executor, 1) == {1: (1, ())}
    assert tier.calls["put"] == 0
    assert breaker.allows()
    assert executor.take_down() == frozenset()


def test_a_put_that_cant_be_made_is_answered_with_nothing(ranks):
    """One that raises when its save starts leaves the others of that save."""
    node = ranks()
    executor = node.executors[0]
    fill(node.slabs[0], 1, 1)
    commands = [
        Command(1, 0, 7, "put", KEYS[:1], (0,), after=7),  # there is no tier 7
        Command(2, 0, 0, "put", KEYS[1:2], (1,), after=7),
    ]
    executor.execute(commands, 0)
    executor.started(7, (Copy().go(),), failed=False)
    assert taken(executor, 2) == {1: (1, ()), 2: (1, (True,))}


def test_d9_a_put_after_a_save_from_before_a_reset(ranks):
    """D9: answered with nothing, and not kept."""
    node = ranks()
    executor, (tier,) = node.executors[0], node.tiers[0]
    executor.execute([Command(1, 0, 0, "put", KEYS[:1], (0,), after=7)], 1)
    assert executor.take_answers() == {1: (1, (False,))}
    executor.started(7, (Copy().go(),), failed=False)
    assert executor.take_answers() == {}
    assert tier.calls["put"] == 0


def test_d9_c13_what_is_written_late_is_what_was_saved(ranks):
    """D9, C13: a reset while a write waits for its turn: it doesn't write another block's bytes under the old name.

    That name is found again, by others and by this engine when it starts anew.
    """
    node = ranks(slots=4, faulty=True)
    (old,) = started_save(node, KEYS[0])
    copy = Copy(fills(node, KEYS[:1], [old]))
    node.executors[0].started(7, (copy,), failed=False)
    assert copy.waited.wait(30)
    fill(node.slabs[0], old.slot, KEYS[0][0])
    node.store.clear()
    node.store.publish([old])  # the save has been reported
    node.send()
    keys = KEYS[10:14]
    refs = [ref for ref in node.store.reserve(keys) if ref is not None]
    for ref in refs:
        fill(node.slabs[0], ref.slot, 99)
    copy.filling = lambda: None
    copy.go()
    node.hear()
    node.store.abandon(refs)
    node.settle()
    for name, value in node.values[0][0].items():
        if name.startswith(KEYS[0]):
            assert value[HEADER_BYTES:] == bytes((index * 11) & 0xFF for index in range(BLOCK))


# -- Blocks that somebody else is about to want ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_what_a_tier_has_lost_is_written_again(ranks, number):
    """Asked for by one lookup, by the scheduler's side; only what any rank lacks is written."""
    node = ranks(ranks=number)
    node.save(*KEYS[:6])
    for name in [name for name in node.values[-1][0] if name[:32] in KEYS[2:4]]:
        del node.values[-1][0][name]
    for mine in node.tiers:
        mine[0].log.clear()
    node.store.assure(KEYS[:8])
    (command,) = node.store.take_commands()
    assert (command.kind, command.keys, command.urgent) == ("exists", tuple(KEYS[:6]), False)
    for executor in node.executors:
        executor.execute([command], 0)
    node.settle()
    assert [node.in_tier(rank) for rank in range(number)] == [set(KEYS[:6])] * number
    puts = [keys for operation, keys in node.tiers[0][0].log if operation == "put"]
    assert {name[:32] for keys in puts for name in keys} == set(KEYS[2:4])


def test_a_lookup_that_fails_tells_of_no_loss(ranks):
    """A tier that can't be asked hasn't lost anything: what it has isn't written again."""
    node = ranks(faulty=True)
    node.save(*KEYS[:4])
    (tier,) = node.tiers[0]
    tier.error = OSError(5, "EIO")
    node.store.assure(KEYS[:4])
    node.send()
    eventually(lambda: tier.calls["exists"])
    puts = tier.calls["put"]
    tier.error = None
    node.settle()
    assert tier.calls["put"] == puts
