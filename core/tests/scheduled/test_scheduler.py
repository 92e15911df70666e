"""Scheduler half: what is promised, loaded and saved, and that nothing stays pinned."""

from __future__ import annotations

import pytest
from tiers import DictTier

from kvplug.scheduled.metadata import Part, SlabHandshake, WorkerReport
from support.scheduled_steps import BLOCK, Half, Request, groups

PROMPT = range(17)


@pytest.fixture
def half():
    """A scheduler half in which four blocks of `PROMPT` are stored."""
    half = Half()
    half.store(PROMPT)
    return half


# -- Promises ----------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_promised_and_loaded(half):
    """A prompt's full blocks are promised, and the load names its blocks and their slots, in order."""
    request = Request("a", PROMPT)
    assert half.ask(request) == (16, True)
    half.admit(request, [11, 12, 13, 14, 15], 16)
    (load,) = half.step().loads
    (part,) = load.parts
    assert (part.group, part.block_ids, len(set(part.slots))) == (0, (11, 12, 13, 14), 4)
    assert (load.request_id, load.asynchronous, load.complete) == ("a", True, True)


def test_before_workers_have_told_of_their_slabs_there_is_nothing():
    """A scheduler half without slots promises nothing, loads nothing, and saves nothing."""
    half = Half(num_slots=0)
    request = Request("a", PROMPT)
    assert half.ask(request) == (0, False)
    half.admit(request, [1, 2, 3, 4, 5], 0)
    metadata = half.start(request, [1, 2, 3, 4, 5])
    assert (metadata.loads, metadata.saves, metadata.commands) == ((), (), ())
    half.ended()
    assert not half.scheduler.has_pending_work()
    assert half.scheduler.take_stats() == {}
    assert half.scheduler.reset()


def test_slabs_are_told_once():
    """Workers may tell of their slabs in their first reports instead of at the start. What comes later is ignored."""
    half = Half(num_slots=0)
    half.ended(slab=SlabHandshake(8, 1024))
    store = half.scheduler.store
    half.ended(slab=SlabHandshake(99, 1024))
    half.scheduler.set_slab(SlabHandshake(99, 1024))
    assert half.scheduler.store is store
    assert store.allocator.capacity == 8


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("transfer", ["between_steps", "layerwise"])
def test_b1_a_token_is_left_where_vllm_needs_one(transfer, length):
    """B1: a synchronous promise leaves a token to compute; an asynchronous one may cover the whole prompt."""
    half = Half(transfer=transfer)
    half.store(range(9))
    tokens, asynchronous = half.ask(Request("a", range(length)))
    left = 0 if transfer == "between_steps" else 1
    assert tokens == (length - left) // BLOCK * BLOCK
    assert asynchronous == (transfer == "between_steps" and tokens > 0)


@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_b1_recurrent_state_leaves_a_token(length):
    """B1: state has the last token in it, and can't take it in twice: the block that ends a prompt isn't loaded."""
    half = Half(groups("state", every_block=True))
    half.store(range(9))
    assert half.ask(Request("a", range(length)))[0] == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("local", range(18))
def test_b8_vllms_own_hit_may_be_longer(half, local):
    """B8: where vLLM has as much itself, or more, the answer is nothing, never less than that."""
    answer = half.ask(Request("a", PROMPT), local)
    assert answer == ((16 - local, True) if local < 16 else (0, False))
    assert half.pins <= 4 - local // BLOCK


@pytest.mark.parametrize("locals_", [(0, 0), (0, 4, 8), (8, 4, 0), (4, 12, 16, 0), (6, 2, 14, 6)])
def test_b9_b10_lookups_have_no_side_effects(half, locals_):
    """B9, B10: however often a request is looked up, with whatever local hit: one answer, one set of pins."""
    request = Request("a", PROMPT)
    for local in locals_:
        assert half.ask(request, local) == ((16 - local, True) if local < 16 else (0, False))
    last = locals_[-1]
    assert half.pins == len(half.scheduler._tracked["a"].hit.refs[0]) <= 4
    assert half.scheduler.stats.get("prefix_cache_queries") == 17  # of the request that stored
    half.admit(request, [11, 12, 13, 14, 15], 16 - last)
    assert half.scheduler.stats.get("prefix_cache_queries") == 17 + 17 - last
    assert half.scheduler.stats.get("prefix_cache_hits") == 16 - last
    half.ended(half.step().loads)
    assert half.pins == 0


def test_requests_that_need_all_computed_are_promised_nothing(half):
    """Prompt log-probabilities and pooling need every position, whether vLLM's request says so itself or not."""
    from types import SimpleNamespace

    for fields in (
        {"skip_reading_prefix_cache": True},
        {"sampling_params": SimpleNamespace(prompt_logprobs=1)},
        {"pooling_params": SimpleNamespace()},
    ):
        assert half.ask(Request("a", PROMPT, **fields)) == (0, False)
    reading = Request("b", PROMPT, skip_reading_prefix_cache=False, sampling_params=SimpleNamespace(prompt_logprobs=1))
    assert half.ask(reading) == (16, True)
    assert half.ask(Request("c", PROMPT, sampling_params=SimpleNamespace(prompt_logprobs=None))) == (16, True)


def test_requests_without_keys_are_neither_loaded_nor_saved(half):
    """Prompt embeddings have no keys."""
    request = Request("a", range(100, 117), prompt_embeds=object())
    assert half.ask(request) == (0, False)
    half.admit(request, [11, 12, 13, 14, 15], 0)
    assert half.start(request, [11, 12, 13, 14, 15]).saves == ()


def test_d4_salts_are_apart(half):
    """D4: what was stored under one salt isn't promised under another, or under none."""
    half.store(range(50, 59))
    salted = Request("s", range(50, 59), cache_salt="x")
    assert half.ask(salted) == (0, False)
    half.admit(salted, [20, 21, 22], 0)
    half.ended(saves=half.start(salted, [20, 21, 22]).saves)
    assert half.ask(Request("t", range(50, 59), cache_salt="x")) == (8, True)
    assert half.ask(Request("u", range(50, 59), cache_salt="y")) == (0, False)


# -- B5: what is promised stays ----------------------------------------------------------------------------------------


def fill(half, start=1000):
    """Store as much as there are slots, so that all that can be evicted is."""
    capacity = half.scheduler.store.allocator.capacity
    half.store(range(start, start + capacity * BLOCK), range(100, 100 + capacity), name=f"fill-{start}")


def test_b5_the_cache_fills_up_between_lookup_and_admission(half):
    """B5: what was promised is loaded from where it was, whatever was evicted in between."""
    request = Request("a", PROMPT)
    slots = [half.scheduler.store.pin_prefix([key])[0].slot for key in half.scheduler._track(request).keys.by_group[0]]
    assert slots == []
    assert half.ask(request) == (16, True)
    pinned = [ref.slot for ref in half.scheduler._tracked["a"].hit.refs[0]]
    fill(half)
    assert half.ask(Request("b", range(1000, 1000 + 28 * BLOCK)))[0] > 0
    half.admit(request, [11, 12, 13, 14, 15], 16)
    (load,) = half.step().loads
    assert list(load.parts[0].slots) == pinned
    assert load.complete


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_b5_promises_are_pinned_until_every_rank_has_loaded(ranks):
    """B5: the slots of a load can be evicted when the last rank has reported, not before."""
    half = Half(num_ranks=ranks)
    half.store(PROMPT)
    load = half.load(Request("a", PROMPT), [11, 12, 13, 14, 15])
    for _ in range(ranks):
        assert half.pins == 4
        fill(half)
        half.ended([load], ranks=1)
    assert half.pins == 0
    assert half.scheduler.num_transfers == 0


@pytest.mark.parametrize("parked", [False, True])
def test_b5_a_request_that_is_never_scheduled_releases(half, parked):
    """B5: aborted after its lookup: nothing stays pinned, and nobody waits any more."""
    request = Request("a", range(17 if not parked else 21))
    if parked:
        saving = Request("s", range(21))
        half.ask(saving)
        half.admit(saving, [1, 2, 3, 4, 5, 6], 0)
        half.start(saving, [1, 2, 3, 4, 5, 6])
    assert half.ask(request) == ((None, False) if parked else (16, True))
    assert (half.pins, half.scheduler.num_parked) == (4, int(parked))
    half.scheduler.finish(request)
    assert (half.pins, half.scheduler.num_parked) == (0, 0)
    assert "a" not in half.scheduler._tracked


def test_b5_aborted_while_loading(half):
    """B5: the load goes on, its slots stay pinned until all have reported, and then nothing is left."""
    request = Request("a", PROMPT)
    load = half.load(request, [11, 12, 13, 14, 15])
    half.scheduler.finish(request)
    assert half.pins == 4
    half.step(finished=["a"])
    half.ended([load])
    assert (half.pins, half.scheduler.num_transfers, half.scheduler.num_tracked_requests) == (0, 0, 0)


def test_b5_an_allocation_that_fails(half):
    """B5: vLLM asked, and had no blocks: asked again later, the answer is the same, and pins are those of one."""
    request = Request("a", PROMPT)
    for _ in range(5):
        assert half.ask(request) == (16, True)
        half.step()
        assert half.pins == 4
    half.admit(request, [11, 12, 13, 14, 15], 16)
    half.ended(half.step().loads)
    assert half.pins == 0


def test_f3_nothing_wanted_nothing_loaded(half):
    """F3: admitted with 0 tokens (MultiConnector chose another connector): nothing is loaded, nothing stays pinned."""
    request = Request("a", PROMPT)
    half.ask(request)
    half.admit(request, (), 0)
    assert half.pins == 0
    assert half.start(request, [11, 12, 13, 14, 15], computed=16).loads == ()
    assert half.scheduler.stats.get("prefix_cache_hits") == 0


def test_admission_without_lookup_or_twice(half):
    """VLLM tells again when blocks of a load have come, with 0 tokens: that loads and counts nothing."""
    request = Request("a", PROMPT)
    half.admit(request, (), 0)
    half.ask(request)
    half.admit(request, [11, 12, 13, 14, 15], 16)
    half.admit(request, (), 0)
    assert len(half.step().loads) == 1
    assert half.step().loads == ()
    assert half.scheduler.stats.get("requests_hit") == 1


def test_an_id_is_used_again_by_another_request(half):
    """A request object that wasn't there before starts anew under a known id, and the old one's end doesn't end it."""
    old, new = Request("a", PROMPT), Request("a", range(9))
    assert half.ask(old) == (16, True)
    assert half.ask(new) == (8, True)
    assert half.pins == 2
    half.scheduler.finish(old)
    assert half.pins == 2
    half.scheduler.finish(new)
    assert half.pins == 0


def test_two_requests_load_the_same_blocks(half):
    """I11: nobody waits for another's load: each has pins of its own, and the first one's end leaves the other's."""
    one = half.load(Request("a", PROMPT), [11, 12, 13, 14, 15])
    two = half.load(Request("b", PROMPT), [16, 17, 18, 19, 20])
    assert one.parts[0].slots == two.parts[0].slots
    half.ended([one])
    assert half.pins == 4
    fill(half)
    half.ended([two])
    assert half.pins == 0


# -- Reports -----------------------------------------------------------------------------------------------------------


def test_reports_that_are_late_double_or_of_others_change_nothing(half):
    """Each load and save ends once; numbers that nobody knows are ignored."""
    load = half.load(Request("a", PROMPT), [11, 12, 13, 14, 15])
    half.scheduler.take_report(WorkerReport(loads={99: (1, True)}, saves={load.number: (1, False), 98: (1, True)}))
    assert half.pins == 4
    for _ in range(3):
        half.ended([load])
    assert half.pins == 0
    half.ended([load], failed=True)
    assert not half.scheduler._tracked["a"].failed


def test_a5_a_failed_load_isnt_promised_again(half):
    """A5: a request whose load failed computes: asked again, it is told of nothing, so it can't fail for ever.

    Others are still promised what is there.
    """
    request = Request("a", PROMPT)
    half.ended([half.load(request, [11, 12, 13, 14, 15])], failed=True)
    assert half.pins == 0
    for _ in range(3):
        assert half.ask(request) == (0, False)
    half.admit(request, (), 0)
    assert half.start(request, [11, 12, 13, 14, 15]).loads == ()
    assert half.ask(Request("b", PROMPT)) == (16, True)


def test_one_rank_fails(half):
    """A load that failed for any rank has failed."""
    half = Half(num_ranks=2)
    half.store(PROMPT)
    request = Request("a", PROMPT)
    load = half.load(request, [11, 12, 13, 14, 15])
    half.ended([load], failed=True, ranks=1)
    assert half.ask(Request("b", PROMPT)) == (16, True)
    half.ended([load], ranks=1)
    assert half.ask(request) == (0, False)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_b3_b4_a_block_counts_when_all_ranks_have_it(failing):
    """B3, B4: what one rank couldn't save isn't there for any; what all have saved is, whoever was first."""
    half = Half(num_ranks=2)
    request = Request("a", PROMPT)
    half.ask(request)
    half.admit(request, [1, 2, 3, 4, 5], 0)
    (save,) = half.start(request, [1, 2, 3, 4, 5]).saves
    half.ended(saves=[save], ranks=1, failed=failing == 1)
    assert half.used == half.reserved == 4
    half.ended(saves=[save], ranks=1, failed=failing == 2)
    assert half.reserved == 0
    assert half.ask(Request("b", PROMPT))[0] == (0 if failing else 16)


# -- Saves -------------------------------------------------------------------------------------------------------------


def test_b13_chunks_are_saved_as_they_are_computed():
    """B13: each step saves the blocks that it fills, each once."""
    half = Half()
    request = Request("a", range(20))
    half.ask(request)
    half.admit(request, [1, 2, 3, 4, 5], 0)
    saved = []
    computed = 0
    for number, chunk in enumerate((3, 1, 6, 5, 5)):
        fields = {"new": [("a", 0, [1, 2, 3, 4, 5])]} if not number else {"cached": [("a", computed, None)]}
        computed += chunk
        for save in half.step({"a": chunk}, **fields).saves:
            saved += save.parts[0].block_ids
            assert saved == list(range(1, computed // BLOCK + 1))
    assert saved == [1, 2, 3, 4, 5]


def test_b14_c15_only_known_tokens_are_saved():
    """B14, C15: draft tokens and ones that aren't known yet fill no block; accepted ones do, a step later."""
    half = Half()
    request = Request("a", range(6))
    half.ask(request)
    half.admit(request, [1, 2, 3, 4], 0)
    assert half.start(request, [1, 2, 3, 4]).saves[0].parts[0].block_ids == (1,)
    request.all_token_ids.append(6)
    # One known token and three drafts: position 7 may be computed, but what it is isn't known.
    assert half.step({"a": 4}, cached=[("a", 6, None)], drafts={"a": [7, 8, 9]}).saves == ()
    request.all_token_ids += [7, 8]
    assert half.step({"a": 1}, cached=[("a", 8, None)]).saves[0].parts[0].block_ids == (2,)


def test_c13_refused_saves_are_counted_and_left_out():
    """C13: where no slot can be had, the rest of a prompt isn't stored; those that were given out still line up."""
    half = Half(num_slots=3)
    request = Request("a", range(20))
    half.ask(request)
    half.admit(request, [1, 2, 3, 4, 5], 0)
    (save,) = half.start(request, [1, 2, 3, 4, 5]).saves
    assert save.parts[0].block_ids == (1, 2, 3)
    assert half.scheduler.stats.get("saves_refused") == 2
    half.ended(saves=[save])
    assert half.ask(Request("b", range(20))) == (12, True)


def test_what_is_stored_is_not_saved_again(half):
    """A prompt that starts like a stored one saves only what is new."""
    request = Request("a", range(21))
    half.ask(request)
    half.admit(request, [11, 12, 13, 14, 15, 16], 16)
    half.ended(half.step().loads)
    (save,) = half.start(request, [11, 12, 13, 14, 15, 16], computed=16).saves
    assert save.parts == (Part(0, (15,), save.parts[0].slots),)


# -- Overwritten blocks ------------------------------------------------------------------------------------------------


def saving(half, name="s", tokens=range(100, 109), blocks=(11, 12, 13)):
    """Let a request save two blocks, and return it and the save."""
    request = Request(name, list(tokens))
    half.ask(request)
    half.admit(request, list(blocks), 0)
    (save,) = half.start(request, list(blocks)).saves
    return request, save


def test_c1_c11_the_step_that_gets_blocks_names_the_saves_that_read_them():
    """C1, C11: preempted or finished, at once or later: whoever gets a block that is still read, is told to wait."""
    half = Half()
    request, save = saving(half)
    assert half.step({"s": 1}, cached=[("s", 9, None)]).overwritten == ()
    half.scheduler.finish(request)
    assert half.step(finished=["s"]).overwritten == ()
    other = Request("b", range(8))
    half.ask(other)
    half.admit(other, [5, 6], 0)
    assert half.start(other, [5, 6]).overwritten == ()
    assert half.step({"b": 1}, cached=[("b", 8, [12])]).overwritten == (save.number,)
    half.ended(saves=[save])
    assert half.step({"b": 1}, cached=[("b", 9, [11])]).overwritten == ()


def test_c1_of_a_new_request_only_what_it_writes():
    """C1: blocks that a new request has in vLLM's own cache are read by it, not written."""
    half = Half()
    _, save = saving(half)
    half.ask(Request("b", range(100, 112)), 8)
    metadata = half.step({"b": 4}, new=[("b", 8, [11, 12, 20])])
    assert metadata.overwritten == ()
    assert half.step({"c": 4}, new=[("c", 4, [11, 12])]).overwritten == (save.number,)


def test_c1_preempted_and_resumed_elsewhere():
    """C1, C3: resumed while its save is under way: blocks that it gets are looked at, and nothing is saved twice."""
    half = Half()
    request, save = saving(half)
    other = Request("b", range(8))
    half.ask(other)
    half.admit(other, [11, 12], 0)
    metadata = half.step({"b": 8}, new=[("b", 0, [11, 12])], preempted={"s"})
    assert metadata.overwritten == (save.number,)
    half.ask(request)
    half.admit(request, [12, 20, 21], 0)
    resumed = half.step({"s": 9}, cached=[("s", 0, [21, 20, 22])], resumed=["s"])
    # Its own blocks are being saved already, under keys that are reserved.
    assert (resumed.saves, resumed.overwritten) == ((), ())
    half.ended(saves=[save, *metadata.saves])
    assert half.reserved == 0
    assert half.ask(Request("c", range(100, 109))) == (8, True)


def test_a_step_that_loads_into_blocks_that_are_read():
    """A load's blocks are given away, too: the step that writes to them waits, or the load itself does."""
    half = Half()
    half.store(PROMPT)
    request, save = saving(half)
    half.scheduler.finish(request)
    load = half.load(Request("a", PROMPT), [11, 12, 13, 14, 15])
    assert set(load.parts[0].block_ids) & set(save.parts[0].block_ids)
    half.ended([load], [save])
    assert (half.pins, half.reserved) == (0, 0)


def test_c5_c6_resumed_requests_have_all_their_tokens():
    """C5, C6: preempted and resumed again and again, amid chunks: what is stored is found by a fresh request."""
    half = Half(num_slots=64)
    request = Request("a", range(10))
    half.ask(request)
    half.admit(request, [1, 2, 3], 0)
    half.ended(saves=half.step({"a": 6}, new=[("a", 0, [1, 2])]).saves)
    half.ended(saves=half.step({"a": 4}, cached=[("a", 6, [3])]).saves)
    for turn in range(1, 4):
        for _ in range(5):
            computed = len(request.all_token_ids)
            request.all_token_ids.append(computed)
            new = [30 + computed] if computed % BLOCK == 0 else None
            half.ended(saves=half.step({"a": 1}, cached=[("a", computed, new)]).saves)
        half.step(preempted={"a"})
        request.num_preemptions += 1
        length = len(request.all_token_ids)
        half.ask(request)
        half.admit(request, (), 0)
        table = [100 * turn + n for n in range(-(-length // BLOCK))]
        half.ended(saves=half.step({"a": 7}, cached=[("a", 0, table[:2])], resumed=["a"]).saves)
        half.ended(saves=half.step({"a": length - 7}, cached=[("a", 7, table[2:])]).saves)
        assert half.scheduler._tables.block_ids("a") == (table,)
    assert half.ask(Request("b", range(25))) == (24, True)
    assert half.scheduler.stats.get("requests_looked_up") == 1


def test_c3_resumed_with_a_load_of_what_it_stored_itself():
    """C3: a preempted request is promised what it has saved, and goes on from there."""
    half = Half()
    request, save = saving(half)
    half.ended(saves=[save])
    half.step(preempted={"s"})
    request.num_preemptions += 1
    load = half.load(request, [20, 21, 22])
    assert load.parts[0].block_ids == (20, 21)
    half.ended([load])
    assert half.step({"s": 1}, cached=[("s", 8, [20, 21, 22])], resumed=["s"]).saves == ()
    assert half.pins == 0


def test_c7_finished_before_after_and_without_anything(half):
    """C7: requests that were never looked up, and the same one twice, are taken."""
    request = Request("a", PROMPT)
    half.scheduler.finish(request)
    half.ask(request)
    half.scheduler.finish(request)
    half.scheduler.finish(request)
    assert (half.pins, half.scheduler.num_tracked_requests) == (0, 0)


# -- Several groups ----------------------------------------------------------------------------------------------------


def test_null_blocks_are_neither_loaded_nor_saved():
    """Behind a window vLLM has null blocks: only the window's blocks travel, in each group."""
    half = Half(groups("full", ("window", BLOCK, 5)))
    table = ([1, 2, 3, 4, 5], [0, 0, 6, 7, 8])
    request = Request("s", PROMPT)
    half.ask(request)
    half.admit(request, table, 0)
    (save,) = half.start(request, table).saves
    assert [(part.group, part.block_ids) for part in save.parts] == [(0, (1, 2, 3, 4)), (1, (6, 7))]
    half.ended(saves=[save])
    load = half.load(Request("a", PROMPT), ([11, 12, 13, 14, 15], [0, 0, 0, 16, 17]))
    assert [(part.group, part.block_ids) for part in load.parts] == [(0, (11, 12, 13, 14)), (1, (16,))]
    assert load.complete
    half.ended([load])
    assert half.pins == 0


def test_a_block_that_isnt_pinned_makes_a_load_incomplete(half):
    """Where vLLM wants a block that wasn't promised, the load says so, and fails: nothing is computed on garbage."""
    half = Half(groups("full", ("window", BLOCK, 4)))
    half.store(PROMPT, ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]))
    load = half.load(Request("a", PROMPT), ([11, 12, 13, 14, 15], [16, 17, 18, 19, 20]))
    assert not load.complete


def test_state_is_saved_where_a_step_ends():
    """In mode `align` a block has the state at its end only if a step ended there."""
    half = Half(groups("full", "state"))
    request = Request("a", PROMPT)
    half.ask(request)
    half.admit(request, ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]), 0)
    table = ([1, 2, 3, 4, 5], [0, 7, 0, 9, 10])
    (save,) = half.step({"a": 8}, new=[("a", 0, table)]).saves
    assert [(part.group, part.block_ids) for part in save.parts] == [(0, (1, 2)), (1, (7,))]
    half.ended(saves=[save])
    assert half.ask(Request("b", range(8))) == (0, False)  # the last token would be taken in twice
    assert half.ask(Request("c", range(9))) == (8, True)
    assert half.ask(Request("d", range(8 + BLOCK))) == (8, True)


# -- Waiting -----------------------------------------------------------------------------------------------------------


def test_a_request_waits_for_what_is_being_saved(clock):
    """Blocks that another request is saving are waited for, and then promised."""
    half = Half()
    _, save = saving(half, tokens=range(9))
    request = Request("a", range(9))
    for _ in range(3):
        assert half.ask(request) == (None, False)
        assert half.scheduler.num_parked == 1
    half.ended(saves=[save])
    assert half.ask(request) == (8, True)
    assert half.scheduler.num_parked == 0


def test_i10_only_so_many_requests_wait(clock):
    """I10: beyond the configured number, requests are told at once what there is; one that leaves makes room."""
    half = Half(max_parked_requests=2)
    saving(half, tokens=range(9))
    requests = [Request(f"w{n}", range(9)) for n in range(4)]
    assert [half.ask(request)[0] for request in requests] == [None, None, 0, 0]
    half.scheduler.finish(requests[0])
    assert half.ask(requests[2]) == (None, False)
    assert half.ask(requests[3]) == (0, False)


def test_i10_a_request_that_waits_again_needs_room(clock):
    """I10: one that was told what there is, got no blocks, and would now wait for more, counts like any other."""
    half = Half(max_parked_requests=1)
    _, save = saving(half, tokens=range(9))
    first, second = Request("w1", range(13)), Request("w2", range(13))
    assert half.ask(first) == (None, False)
    half.ended(saves=[save])
    assert half.ask(first) == (8, True)
    saving(half, name="t", tokens=range(13), blocks=(14, 15, 16, 17))
    assert half.ask(second) == (None, False)
    assert half.ask(first) == (8, True)
    assert half.scheduler.num_parked == 1
    half.scheduler.finish(second)
    assert half.ask(first) == (None, False)


def test_i10_requests_whose_time_is_up_make_room(clock):
    """I10: vLLM may not ask again for long: who has waited long enough keeps nobody else from waiting."""
    half = Half(max_parked_requests=1, l2_load_timeout=0.5)
    saving(half, tokens=range(9))
    assert half.ask(Request("w1", range(9))) == (None, False)
    assert half.ask(Request("w2", range(9))) == (0, False)
    clock.now += 0.6
    assert half.scheduler.num_parked == 0
    assert half.ask(Request("w3", range(9))) == (None, False)


def test_nobody_waits_where_that_is_switched_off():
    """With 0 parked requests the answer is never None."""
    half = Half(max_parked_requests=0, tiers=(DictTier,))
    saving(half, tokens=range(9))
    assert half.ask(Request("a", range(9))) == (0, False)


def test_a_request_waits_until_its_deadline(clock):
    """After its deadline it is told what there is, and doesn't wait again; that is counted once."""
    half = Half(l2_load_timeout=0.5)
    half.store(range(5))
    saving(half, tokens=range(9))
    request = Request("a", range(9))
    assert half.ask(request) == (None, False)
    clock.now += 0.4
    assert half.ask(request) == (None, False)
    clock.now += 0.2
    for _ in range(3):
        assert half.ask(request) == (4, True)
    assert half.scheduler.stats.get("l2_load_timeouts") == 1
    half.scheduler.finish(request)
    assert half.pins == 0


# -- L2 ----------------------------------------------------------------------------------------------------------------


def with_l2(**settings):
    half = Half(tiers=(DictTier,), **settings)
    half.scheduler.store._max_age = 1e9
    return half


def answer(half, commands, *there, ranks=None):
    """Report the answers to commands: for each the same to all its keys."""
    ranks = half.num_ranks if ranks is None else ranks
    half.ended(
        answers={
            command.number: (ranks, tuple([one] * len(command.keys) if isinstance(one, bool) else one))
            for command, one in zip(commands, there, strict=True)
        }
    )


def test_what_only_l2_has_is_fetched_while_the_request_waits():
    """I12: looked up, read into slots, then promised, by commands to the workers: the scheduler waits for nothing."""
    half = with_l2()
    request = Request("a", PROMPT)
    assert half.ask(request) == (None, False)
    assert half.scheduler.has_pending_work()
    (exists,) = half.step().commands
    assert (exists.kind, len(exists.keys)) == ("exists", 4)
    assert half.step().commands == ()
    assert half.ask(request) == (None, False)
    answer(half, [exists], (True, True, True, False))
    assert half.ask(request) == (None, False)
    (get,) = half.step().commands
    assert (get.kind, len(get.slots)) == ("get", 3)
    assert half.ask(request) == (None, False)
    answer(half, [get], True)
    assert half.ask(request) == (12, True)
    half.admit(request, [1, 2, 3, 4, 5], 12)
    assert half.scheduler.sources(request, 12) == (0, 12, frozenset({"dict"}))
    half.ended(half.step().loads)
    assert (half.pins, half.reserved, half.scheduler.num_parked) == (0, 0, 0)


def test_sources_tell_l1_from_l2():
    """What was in L1 before counts as that; nothing is known of a request that isn't ours."""
    half = with_l2()
    half.store(range(9))
    half.step()
    request = Request("a", PROMPT)
    assert half.ask(request) == (None, False)
    (exists,) = half.step().commands
    assert len(exists.keys) == 2
    answer(half, [exists], True)
    (get,) = half.step().commands
    answer(half, [get], True)
    assert half.ask(request) == (16, True)
    half.admit(request, [1, 2, 3, 4, 5], 16)
    assert half.scheduler.sources(request, 16) == (8, 8, frozenset({"dict"}))
    assert half.scheduler.sources(Request("x", []), 5) == (5, 0, frozenset())


def test_a5_a_lookup_that_said_yes_and_a_read_that_fails_is_a_miss():
    """A5: the request doesn't wait again for what couldn't be read; the next one asks anew."""
    half = with_l2()
    request = Request("a", PROMPT)
    half.ask(request)
    (exists,) = half.step().commands
    answer(half, [exists], True)
    half.ask(request)
    (get,) = half.step().commands
    answer(half, [get], False)
    for _ in range(3):
        assert half.ask(request) == (0, False)
        assert half.step().commands == ()
    assert half.reserved == 0


@pytest.mark.parametrize("first", [0, 1])
def test_b3_the_hit_is_what_all_ranks_have(first):
    """B3: a block that one rank's tier has lost isn't there; the answer comes when all ranks have told."""
    half = with_l2(num_ranks=2)
    request = Request("a", PROMPT)
    half.ask(request)
    (exists,) = half.step().commands
    reports = [(True, True, True, True), (True, True, False, True)]
    answer(half, [exists], reports[first], ranks=1)
    assert half.step().commands == ()
    answer(half, [exists], reports[1 - first], ranks=1)
    (get,) = half.step().commands
    assert len(get.keys) == 2
    answer(half, [get], True, ranks=1)
    assert half.ask(request) == (None, False)
    answer(half, [get], True, ranks=1)
    assert half.ask(request) == (8, True)


def test_a_rank_whose_tier_fails_ends_the_waiting():
    """A tier that any rank leaves alone isn't asked, until all say that it works."""
    half = with_l2(num_ranks=2)
    half.ended(down={1: frozenset({"dict"})})
    assert half.ask(Request("a", PROMPT)) == (0, False)
    half.ended(down={0: frozenset()})
    assert half.ask(Request("b", PROMPT)) == (0, False)
    half.ended(down={1: frozenset()})
    assert half.ask(Request("c", PROMPT)) == (None, False)


def test_a_request_that_ends_while_its_blocks_come_leaves_nothing():
    """Aborted while it waits for L2: what comes is in L1 for the next one."""
    half = with_l2()
    request = Request("a", PROMPT)
    half.ask(request)
    (exists,) = half.step().commands
    answer(half, [exists], True)
    (get,) = half.step().commands
    half.scheduler.finish(request)
    answer(half, [get], True)
    assert (half.reserved, half.pins, half.scheduler.num_parked) == (0, 0, 0)
    assert half.ask(Request("b", PROMPT)) == (16, True)


# -- Reset -------------------------------------------------------------------------------------------------------------


def test_d9_a_reset_forgets_everything(half):
    """D9: nothing of before is promised, a save under way isn't published, and running requests save nothing."""
    request, save = saving(half)
    waiting = Request("w", PROMPT)
    half.ask(waiting)
    assert half.scheduler.reset()
    assert half.pins == 0
    half.ended(saves=[save])
    assert half.used == 0
    assert half.ask(Request("b", range(100, 109))) == (0, False)
    assert half.ask(waiting) == (0, False)
    request.all_token_ids += range(109, 113)
    metadata = half.step({"s": 4}, cached=[("s", 9, None)])
    assert (metadata.saves, metadata.epoch) == ((), 1)


def test_d9_a_reset_while_a_load_is_under_way(half):
    """D9: what a request is loading is from before, and it says so; its slots are free when the load has ended."""
    load = half.load(Request("a", PROMPT), [11, 12, 13, 14, 15])
    assert not half.scheduler.reset()
    half.ended([load])
    assert half.used == 0
    assert half.scheduler.reset()


def test_d9_what_comes_from_l2_after_a_reset_is_not_found():
    """D9: a read that was under way doesn't bring back what was forgotten."""
    half = with_l2()
    request = Request("a", PROMPT)
    half.ask(request)
    (exists,) = half.step().commands
    answer(half, [exists], True)
    half.ask(request)
    (get,) = half.step().commands
    half.scheduler.reset()
    answer(half, [get], True)
    assert half.used == 0
    assert half.ask(Request("b", PROMPT)) == (None, False)  # asks L2 anew, which the workers have left behind
    (again,) = half.step().commands
    assert (again.kind, again.epoch) == ("exists", 1)


# -- Idle engines ------------------------------------------------------------------------------------------------------


def test_an_idle_engine_is_stepped_while_there_is_something_to_learn(half, monkeypatch):
    """Transfers under way and commands keep it going; nothing else does, and not for ever.

    A load, too: vLLM frees the blocks of a request that was aborted when its load is reported.
    """
    from kvplug.scheduled import transfers

    assert not half.scheduler.has_pending_work()
    request, save = saving(half)
    half.scheduler.finish(request)
    assert half.scheduler.has_pending_work()
    half.ended(saves=[save])
    assert not half.scheduler.has_pending_work()
    half.store(range(300, 317))
    request = Request("loads", [*range(300, 317)])
    load = half.load(request, [11, 12, 13, 14, 15])
    half.scheduler.finish(request)
    assert half.scheduler.has_pending_work()
    half.ended([load])
    assert not half.scheduler.has_pending_work()
    request, save = saving(half, tokens=range(200, 209))
    monkeypatch.setattr(transfers, "_IDLE_SECONDS", 0.0)
    assert not half.scheduler.has_pending_work()


def test_steps_without_tokens_are_marked(half):
    """A worker may wait a moment in such a step for something to end."""
    assert half.step().idle
    assert not half.start(Request("a", range(3)), [1]).idle


# -- Others under MultiConnector ---------------------------------------------------------------------------------------


def test_what_another_connector_loaded_is_not_saved():
    """Tokens that neither vLLM nor the connector had are another connector's, and may yet turn out not to be there."""
    half = Half()
    request = Request("a", PROMPT)
    half.ask(request, 0)
    half.admit(request, (), 0)
    step = half.start(request, [1, 2, 3, 4, 5], computed=16, has_sync_kv_loads=True)
    assert step.saves == ()
    request.all_token_ids += [17, 18, 19, 20]
    assert half.step({"a": 4}, cached=[("a", 17, None)]).saves == ()


def test_its_own_loads_are_no_reason(half):
    """Synchronous loads of its own don't keep a request from being saved."""
    half = Half(transfer="layerwise")
    half.store(PROMPT)
    request = Request("a", range(21))
    assert half.ask(request) == (16, False)
    half.admit(request, [11, 12, 13, 14, 15, 16], 16)
    metadata = half.start(request, [11, 12, 13, 14, 15, 16], computed=16, has_sync_kv_loads=True)
    assert [load.asynchronous for load in metadata.loads] == [False]
    assert metadata.saves[0].parts[0].block_ids == (15,)


def test_i10_loads_cant_hold_all_blocks(clock):
    """I10: below 0.22.1 vLLM doesn't reserve blocks: a load is let in only if all fit, else it waits, bounded."""
    half = Half(scheduler={"num_blocks": 12})
    half.store(PROMPT)
    one, two = Request("a", PROMPT), Request("b", PROMPT)
    load = half.load(one, [11, 12, 13, 14, 15])
    assert half.ask(Request("c", range(9))) == (8, True)
    assert half.ask(two) == (16, True)
    three = Request("d", range(24))
    assert half.ask(three) == (None, False)
    half.ended([load])
    half.start(one, [11, 12, 13, 14, 15], computed=16)
    assert half.ask(three) == (16, True)


def test_usage_is_reported_when_it_changed(half):
    """In bytes, of all ranks."""
    assert half.scheduler.take_stats()["l1_usage_bytes"] == {0: 4 * 1024}
    assert "l1_usage_bytes" not in half.scheduler.take_stats()
    half.scheduler.reset()
    assert half.scheduler.take_stats()["l1_usage_bytes"] == {0: 0}


def test_i15_queries_and_hits_are_vllms(half):
    """I15: a preempted request doesn't count again, and local tokens aren't asked for."""
    half.scheduler.stats.take()
    request = Request("a", range(100, 120))
    half.ask(request, 12)
    half.admit(request, (), 0)
    assert half.scheduler.stats.take() == {"requests_looked_up": 1, "prefix_cache_queries": 8}
    half.start(request, range(1, 6), computed=12)
    request.num_preemptions += 1
    half.ask(request)
    half.admit(request, (), 0)
    assert "prefix_cache_queries" not in half.scheduler.stats.take()


# -- Requests that don't start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("failed", [False, True])
def test_i10_a_request_is_passed_over_while_others_hold_what_it_lacks(half, failed):
    """I10: one at the head of vLLM's queue that gets no blocks keeps those behind it from starting, which have some.

    So when nothing runs, and another one's load has ended, vLLM is told to go on to the next one.
    """
    loading, head = Request("loading", PROMPT), Request("head", range(100, 140))
    load = half.load(loading, [11, 12, 13, 14, 15])
    assert half.ask(head) == (0, False), "it is being loaded: vLLM doesn't look at it"
    half.step()
    half.ended([load], failed=failed)
    assert half.ask(head) == (None, False)
    assert half.ask(head) == (None, False), "in each step, until it starts"
    if failed:  # vLLM asks for it again, so it has got to it
        assert half.ask(loading) == (0, False)
    else:
        half.start(loading, [11, 12, 13, 14, 15], computed=16)
    assert half.ask(head) == (0, False)


def test_nobody_is_passed_over_while_others_run(half):
    """A request that runs will end, and give its blocks back: one that waits at the head isn't left behind."""
    loading, head, running = (
        Request("loading", PROMPT),
        Request("head", range(100, 140)),
        Request("runs", range(50, 57)),
    )
    load = half.load(loading, [11, 12, 13, 14, 15])
    half.start(running, [20, 21])
    half.ended([load])
    assert half.ask(head) == (0, False)


def test_one_that_is_gone_keeps_nobody(half):
    """A request that was aborted after its load holds nothing any more."""
    loading, head = Request("loading", PROMPT), Request("head", range(100, 140))
    load = half.load(loading, [11, 12, 13, 14, 15])
    half.step()
    half.ended([load])
    half.scheduler.finish(loading)
    assert half.ask(head) == (0, False)
