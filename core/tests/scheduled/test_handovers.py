"""Scheduler half of prompts that go from one engine to another: their ends, their waits, and writes that don't wait."""

from __future__ import annotations

from typing import ClassVar

import pytest
from tiers import DictTier

from kvplug.scheduled.lookups import num_loadable
from kvplug.scheduled.metadata import SlabHandshake
from kvplug.scheduled.scheduler import SchedulerHalf
from support.scheduled_steps import BLOCK, Half, Request, groups, scheduled_settings

#: Four full blocks and two tokens.
PROMPT = range(18)
TABLE = [1, 2, 3, 4, 5]


class Handovers(SchedulerHalf):
    """Hands every prompt over, and waits for every prompt."""

    tails: ClassVar[bool] = True
    #: Of the requests that are tracked from now on.
    save_tail_at = 0
    patience = 0.0
    expected = 1 << 62

    def prepare(self, tracked):
        tracked.save_tail_at = self.save_tail_at
        tracked.patience, tracked.num_expected_tokens = self.patience, self.expected


class AtOnce(Handovers):
    """Writes what it saves at once."""

    writes_at_once: ClassVar[bool] = True


def make(of=(), *, kind=Handovers, num_slots=32, num_ranks=1, tiers=(), **settings):
    half = Half(of, num_slots=0, num_ranks=num_ranks, tiers=tiers, **settings)
    half.scheduler = kind(
        scheduled_settings(*tiers, **settings),
        namespace=bytes(32),
        groups=of or groups(),
        num_ranks=num_ranks,
        drop_last_hit=False,
    )
    half.scheduler.set_slab(SlabHandshake(num_slots, 1024))
    half.scheduler.store._max_age = 1e9
    return half


def begin(half, request, tail_at=0):
    """Look up a request whose end is to be saved, and admit it."""
    half.scheduler.save_tail_at = tail_at
    half.ask(request)
    half.admit(request, (), 0)
    half.scheduler.save_tail_at = 0
    return half.scheduler._tracked[request.request_id]


def tails_of(half, tokens, stop):
    """Return the keys of a prompt's end."""
    tracked = half.scheduler._track(Request("keys", list(tokens)))
    half.scheduler._has_keys(tracked)
    keys = tracked.keys.tail(list(tokens), stop).keys
    half.scheduler.finish(tracked.request)
    return keys


def blocks_of(saves):
    return {(part.group, block) for save in saves for part in save.parts for block in part.block_ids}


def keys_of(half, saves):
    allocator = half.scheduler.store.allocator
    return [allocator._keys[slot] for save in saves for part in save.parts for slot in part.slots]


def commands_of(metadata, kind):
    return [command for command in metadata.commands if command.kind == kind]


def answer(half, commands, there=True, ranks=None):
    """Report the same answer to all keys of commands."""
    number = half.num_ranks if ranks is None else ranks
    half.ended(answers={command.number: (number, (there,) * len(command.keys)) for command in commands})


# -- Ends of prompts ---------------------------------------------------------------------------------------------------


def test_a_prompts_end_is_saved_with_its_last_block():
    """The block that the prompt doesn't fill is saved, once, under the tail's key, in the step that ends with it."""
    half = make()
    request = Request("a", PROMPT)
    tracked = begin(half, request, 18)
    (save,) = half.start(request, TABLE).saves
    assert blocks_of([save]) == {(0, block) for block in TABLE}
    assert keys_of(half, [save])[-1:] == list(tails_of(half, PROMPT, 18))
    assert tracked.tail_saved
    request.all_token_ids.append(18)
    assert half.step({"a": 1}, cached=[("a", 18, None)]).saves == ()
    half.ended(saves=[save])
    assert half.used == 5
    assert half.ask(Request("b", PROMPT)) == (18, True)


def test_without_being_asked_nothing_but_full_blocks_is_saved():
    """The control."""
    half = make()
    request = Request("a", PROMPT)
    begin(half, request)
    (save,) = half.start(request, TABLE).saves
    assert blocks_of([save]) == {(0, block) for block in TABLE[:4]}
    half.ended(saves=[save])
    assert half.ask(Request("b", PROMPT)) == (16, True)


def test_a_prompt_that_fills_its_blocks_has_no_end_of_its_own():
    """Nothing is saved twice, and what is there is the whole prompt."""
    half = make()
    request = Request("a", range(16))
    tracked = begin(half, request, 16)
    saves = half.start(request, TABLE[:4]).saves
    assert blocks_of(saves) == {(0, block) for block in TABLE[:4]}
    assert tracked.tail_saved
    half.ended(saves=saves)
    assert half.ask(Request("b", range(16))) == (16, True)


@pytest.mark.parametrize("chunks", [(18,), (17, 1), (16, 2), (7, 7, 4), (1,) * 18, (4, 4, 4, 4, 2), (15, 3)])
def test_b13_in_chunks_the_end_is_saved_once_and_not_before(chunks):
    """B13: whatever the chunks, the tail's key is reserved in the one step that computes the last token."""
    half = make()
    request = Request("a", PROMPT)
    begin(half, request, 18)
    (key,) = tails_of(half, PROMPT, 18)
    computed, saved = 0, []
    for number, chunk in enumerate(chunks):
        fields = {"cached": [("a", computed, None)]} if number else {"new": [("a", 0, TABLE)]}
        saves = half.step({"a": chunk}, **fields).saves
        computed += chunk
        keys = keys_of(half, saves)
        assert (key in keys) == (computed == 18)
        saved += keys
    request.all_token_ids += range(18, 24)
    for position in range(18, 24):
        saved += keys_of(half, half.step({"a": 1}, cached=[("a", position, [6] if position == 20 else None)]).saves)
    assert saved.count(key) == 1
    assert len(saved) == len(set(saved)) == 7


def test_j3_the_end_is_saved_again_after_a_preemption():
    """J3: preempted before the end, amid it, and after: the request that starts again saves its end again, once."""
    half = make()
    request = Request("a", PROMPT)
    tracked = begin(half, request, 18)
    (key,) = tails_of(half, PROMPT, 18)
    half.ended(saves=half.step({"a": 10}, new=[("a", 0, TABLE[:3])]).saves)
    assert not tracked.tail_saved
    for turn in (1, 2):
        half.step(preempted={"a"})
        half.scheduler.store.allocator.discard([key])
        request.num_preemptions += 1
        half.ask(request)
        half.admit(request, (), 0)
        length = len(request.all_token_ids)
        table = [10 * turn + number for number in range(6)]
        saves = half.step({"a": 17}, cached=[("a", 0, table)], resumed=["a"]).saves
        assert key not in keys_of(half, saves)
        half.ended(saves=saves)
        saves = half.step({"a": length - 17}, cached=[("a", 17, None)]).saves
        assert keys_of(half, saves).count(key) == 1
        assert (0, table[4]) in blocks_of(saves)
        assert tracked.tail_saved
        half.ended(saves=saves)
        request.all_token_ids.append(length)
    saves = half.step({"a": 1}, cached=[("a", len(request.all_token_ids) - 1, None)]).saves
    assert key not in keys_of(half, saves)


def test_the_end_of_a_prompt_whose_blocks_are_known_is_saved():
    """All but the last tokens were loaded, or in vLLM's own cache: the end is saved all the same."""
    half = make()
    half.store(range(16))
    request = Request("a", PROMPT)
    half.scheduler.save_tail_at = 18
    load = half.load(request, TABLE)
    half.ended([load])
    saves = half.start(request, TABLE, computed=16).saves
    assert keys_of(half, saves) == list(tails_of(half, PROMPT, 18))


def test_b14_only_known_tokens_make_an_end():
    """B14: an end that a step would reach with draft tokens, or ones that aren't known, isn't reached."""
    half = make()
    request = Request("a", range(17))
    tracked = begin(half, request, 18)
    half.start(request, TABLE)
    assert not tracked.tail_saved
    assert half.step({"a": 3}, cached=[("a", 16, None)], drafts={"a": [1, 2]}).saves == ()
    assert not tracked.tail_saved
    request.all_token_ids.append(17)
    saves = half.step({"a": 1}, cached=[("a", 17, None)]).saves
    assert keys_of(half, saves) == list(tails_of(half, PROMPT, 18))


def test_an_end_behind_which_the_step_goes_on_is_saved():
    """KV of later tokens in the same block does no harm: loaders use the first ones."""
    half = make()
    request = Request("a", PROMPT)
    begin(half, request, 17)
    saves = half.start(request, TABLE).saves
    assert keys_of(half, saves)[-1:] == list(tails_of(half, PROMPT, 17))
    assert (0, 5) in blocks_of(saves)


def test_null_blocks_have_no_end():
    """A group that keeps no block at the end has none to save; the others' are saved."""
    half = make(groups("full", ("window", BLOCK, 5)))
    request = Request("a", PROMPT)
    begin(half, request, 18)
    saves = half.start(request, (TABLE, [0, 0, 6, 7, 0])).saves
    assert (0, 5) in blocks_of(saves)
    assert not blocks_of(saves) & {(1, 0)}


def test_groups_of_unequal_blocks_have_ends_of_their_own():
    """Each group's last block, as far as the prompt doesn't fill it."""
    half = make(groups(("full", 4, 0), ("window", 8, 9), ("full", 2, 0)))
    request = Request("a", PROMPT)
    begin(half, request, 18)
    saves = half.start(request, (TABLE, [11, 12, 13], list(range(21, 30)))).saves
    assert {(0, 5), (1, 13)} <= blocks_of(saves)
    one, two, three = tails_of(half, PROMPT, 18)
    assert three is None
    keys = keys_of(half, saves)
    assert (keys.count(one), keys.count(two), len(keys)) == (1, 1, 5 + 3 + 9)
    half.ended(saves=saves)
    assert half.ask(Request("b", PROMPT)) == (18, True)


@pytest.mark.parametrize(
    ("step", "known"), [(18, 18), (20, 20), (19, 20)], ids=["ends there", "ends behind it", "ends behind, more known"]
)
def test_state_is_saved_only_where_a_step_ends(step, known):
    """A state is that of the step's last token; full attention's block is the same whatever comes behind."""
    half = make(groups("full", "state"))
    request = Request("a", range(known))
    begin(half, request, 18)
    saves = half.step({"a": step}, new=[("a", 0, (TABLE, [0, 0, 0, 0, 9]))]).saves
    of_full, of_state = tails_of(half, range(known), 18)
    keys = keys_of(half, saves)
    assert of_full in keys
    assert (of_state in keys) == (step == 18)
    assert ((1, 9) in blocks_of(saves)) == (step in {18, 20})  # 20 ends a block


def test_state_isnt_saved_amid_drafts():
    """Speculative tokens may be taken into a state."""
    half = make(groups("full", "state"))
    request = Request("a", PROMPT)
    begin(half, request, 18)
    saves = half.step({"a": 18}, new=[("a", 0, (TABLE, [0, 0, 0, 0, 9]))], drafts={"a": [1]}).saves
    of_full, of_state = tails_of(half, PROMPT, 18)
    assert of_full in keys_of(half, saves)
    assert of_state not in keys_of(half, saves)


@pytest.mark.parametrize("of", [groups("full", "state"), groups("full", ("window", BLOCK, 8))], ids=["state", "window"])
def test_the_step_after_an_end_waits_for_the_save_of_state(of):
    """The next token goes into the same block: behind what full attention saves, but in place of the state."""
    half = make(of)
    request = Request("a", PROMPT)
    begin(half, request, 18)
    table = (TABLE, [0, 0, 0, 8, 9])
    (save,) = half.start(request, table).saves
    request.all_token_ids.append(18)
    waits = (save.number,) if of[1].kind == "state" else ()
    assert half.step({"a": 1}, cached=[("a", 18, None)]).overwritten == waits
    request.all_token_ids.append(19)
    assert half.step({"a": 1}, cached=[("a", 19, None)]).overwritten == ()


def test_full_blocks_of_state_are_no_reason_to_wait():
    """The control: where no prompt ends in the step, the next one goes into other blocks."""
    half = make(groups("full", "state"))
    request = Request("a", range(16))
    begin(half, request, 0)
    assert half.start(request, (TABLE[:4], [0, 0, 0, 8])).saves
    request.all_token_ids.append(16)
    assert half.step({"a": 1}, cached=[("a", 16, ([5], [9]))]).overwritten == ()


def test_ends_of_generated_tokens_arent_looked_for():
    """A request that has generated tokens is looked up by its full blocks."""
    half = make()
    request = Request("a", PROMPT)
    begin(half, request, 18)
    half.ended(saves=half.start(request, TABLE).saves)
    other = Request("b", PROMPT)
    other.num_prompt_tokens = 17
    assert half.ask(other) == (16, True)


def test_an_end_is_loaded_into_the_last_block():
    """The load names the block that the tail goes to, and its slot; afterwards nothing is pinned."""
    half = make()
    request = Request("a", PROMPT)
    begin(half, request, 18)
    half.ended(saves=half.start(request, TABLE).saves)
    other = Request("b", PROMPT)
    load = half.load(other, [11, 12, 13, 14, 15])
    assert (load.parts[0].block_ids, load.complete) == ((11, 12, 13, 14, 15), True)
    (key,) = tails_of(half, PROMPT, 18)
    assert half.scheduler.store.allocator._keys[load.parts[0].slots[-1]] == key
    half.ended([load])
    assert half.pins == 0


# -- How much can be loaded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "tokens", "expected"),
    [
        (groups("full"), 18, 18),
        (groups("full"), 16, 16),
        (groups("full"), 2, 2),
        (groups("full"), 1, 0),  # vLLM would ask again and again
        (groups("full", "state"), 18, 17),
        (groups("state"), 16, 15),
        # A window of 5: after 8 tokens blocks from (8 - 4) // 4 on are needed, after 7 from (7 - 4) // 4 on.
        (groups("full", ("window", 4, 5)), 8, 7),
        (groups("full", ("window", 4, 5)), 7, 7),
        (groups("full", ("window", 4, 5)), 9, 9),
        (groups(("window", 4, 6)), 9, 8),
        (groups(("window", 4, 6)), 8, 8),
        # A chunk begins at its multiple: there nothing of what came before is needed.
        (groups("full", ("chunk", 4, 8)), 8, 7),
        (groups("full", ("chunk", 4, 8)), 12, 12),
        (groups("full", ("chunk", 4, 8)), 16, 15),
        (groups("full", ("chunk", 4, 8)), 17, 17),
        (groups(("full", 8, 0), ("window", 4, 5)), 12, 11),
    ],
)
def test_b1_how_many_tokens_can_be_loaded(of, tokens, expected):
    """B1: all, unless the last token can't be computed again from what is kept; a synchronous load leaves it."""
    assert num_loadable(tokens, of, asynchronous=True) == expected
    assert num_loadable(tokens, of, asynchronous=False) == tokens - 1


@pytest.mark.parametrize("window", range(1, 14))
def test_b1_the_last_token_finds_what_it_needs(window):
    """B1: if all tokens are promised, blocks that vLLM keeps after them are those that the last one attends to."""
    of = groups(("window", 4, window))
    for tokens in range(2, 40):
        loadable = num_loadable(tokens, of, asynchronous=True)
        kept = of[0].first_needed(tokens) * 4  # vLLM keeps the blocks from this token on
        attended = max(0, tokens - window)  # by the last token, whose own position is tokens - 1
        assert loadable in {tokens, tokens - 1}
        assert loadable < tokens or kept <= attended


# -- Waiting for what another engine stores ----------------------------------------------------------------------------


def patient(seconds=2.0, expected=1 << 62, of=(), **settings):
    half = make(of, tiers=(DictTier,), **({"l2_load_timeout": 0.5} | settings))
    half.scheduler.patience, half.scheduler.expected = seconds, expected
    return half


def steps_of_waiting(half, request, clock, *, there=None, pause=0.001, seconds=10.0):
    """Ask for a request, as vLLM does in each step, until it is told; return what, when, and the lookups."""
    asked = []
    start = clock.now
    while clock.now - start < seconds:
        promised = half.ask(request)
        if promised[0] is not None:
            return promised, clock.now - start, asked
        metadata = half.step()
        for command in metadata.commands:
            if command.kind == "exists":
                asked.append(list(command.keys))
                found = [key in there for key in command.keys] if there is not None else [False] * len(command.keys)
                half.ended(answers={command.number: (1, tuple(found))})
            else:
                answer(half, [command])
        clock.now += pause
    raise AssertionError("it waits for ever")


def test_j7_what_never_comes_is_waited_for_until_the_deadline(clock):
    """J7: as long as its patience lasts, with few lookups, then it is told that there is nothing, for good."""
    half = patient()
    request = Request("a", PROMPT)
    promised, waited, asked = steps_of_waiting(half, request, clock)
    assert promised == (0, False)
    assert waited == pytest.approx(2.0, abs=0.01)
    # All five keys twice (at the start, and once more), then the first alone, at growing intervals.
    assert [len(keys) for keys in asked[:2]] == [5, 5]
    assert {len(keys) for keys in asked[2:]} == {1}
    assert 2.0 / 0.05 - 1 <= len(asked) <= 2.0 / 0.05 + 15
    assert half.scheduler._tracked["a"].wait.timed_out
    assert half.scheduler.stats.get("l2_load_timeouts") == 1
    for _ in range(3):
        assert half.ask(request) == (0, False)
        assert half.step().commands == ()
    assert half.scheduler.num_parked == 0
    half.scheduler.finish(request)
    assert (half.pins, half.reserved) == (0, 0)


def test_without_patience_nobody_waits_for_what_isnt_there(clock):
    """The control: one lookup, and the request is told."""
    half = patient(0.0)
    promised, waited, asked = steps_of_waiting(half, Request("a", PROMPT), clock)
    assert promised == (0, False)
    assert waited < 0.01
    assert len(asked) == 1


@pytest.mark.parametrize("seconds", [0.2, 3.0])
def test_the_wait_for_others_is_as_long_as_patience(clock, seconds):
    """Where nothing is on its way, a request isn't held back for as long as loading may take."""
    half = patient(seconds)
    _, waited, _ = steps_of_waiting(half, Request("a", PROMPT), clock)
    assert waited == pytest.approx(seconds, abs=0.01)


def test_j7_what_comes_late_is_promised_at_once(clock):
    """J7: all that the other engine has stored by then, to the last token."""
    half = patient()
    request = Request("a", PROMPT)
    there = set()
    tracked = half.scheduler._track(request)
    half.scheduler._has_keys(tracked)
    keys = [*tracked.keys.by_group[0], *tracked.keys.tail(list(PROMPT), 18).keys]

    class Later:
        def __contains__(self, key):
            return clock.now >= 1000.4 and key in keys

    promised, waited, asked = steps_of_waiting(half, request, clock, there=Later())
    assert promised == (18, True)
    assert 0.4 <= waited < 0.5
    assert not tracked.wait.timed_out
    assert there == set()
    assert len(asked) < 25
    half.admit(request, [11, 12, 13, 14, 15], 18)
    half.ended(half.step().loads)
    assert (half.pins, half.reserved, half.scheduler.num_parked) == (0, 0, 0)


def test_what_comes_block_by_block_is_taken_as_it_comes(clock):
    """Each block that has come makes the next look a quick one, for all that is left."""
    half = patient()
    request = Request("a", PROMPT)
    tracked = half.scheduler._track(request)
    half.scheduler._has_keys(tracked)
    keys = [*tracked.keys.by_group[0], *tracked.keys.tail(list(PROMPT), 18).keys]

    class Growing:
        def __contains__(self, key):
            return keys.index(key) < (clock.now - 1000.0) / 0.2

    promised, waited, asked = steps_of_waiting(half, request, clock, there=Growing())
    assert promised == (18, True)
    assert 0.8 <= waited < 0.95
    assert len(asked) < 60


@pytest.mark.parametrize(("expected", "found"), [(8, 8), (16, 16), (4, 4), (0, 0)])
def test_it_is_not_waited_for_more_than_is_expected(clock, expected, found):
    """What the other engine has said it stores is there: the request is told, although its prompt goes on."""
    half = patient(expected=expected)
    request = Request("a", PROMPT)
    tracked = half.scheduler._track(request)
    half.scheduler._has_keys(tracked)
    there = set(tracked.keys.by_group[0][: found // BLOCK])
    promised, waited, _ = steps_of_waiting(half, request, clock, there=there)
    assert promised == (found, found > 0)
    assert waited < 0.05


@pytest.mark.parametrize("local", [16, 12])
def test_what_vllm_has_itself_counts_as_expected(clock, local):
    """No wait for what is in vLLM's own cache already; what is missing behind it is waited for."""
    half = patient(expected=16)
    request = Request("a", PROMPT)
    half.ask(request, local)
    for command in half.step().commands:
        answer(half, [command], there=False)
    assert half.ask(request, local) == ((0, False) if local == 16 else (None, False))


def test_what_is_in_l1_needs_no_wait(clock):
    """A prompt that is stored here to its end is promised at the first look."""
    half = patient()
    request = Request("s", PROMPT)
    half.scheduler.patience = 0.0
    begin(half, request, 18)
    half.ended(saves=half.start(request, TABLE).saves)
    half.scheduler.patience = 2.0
    assert half.ask(Request("a", PROMPT)) == (18, True)


def test_without_a_tier_that_works_nobody_waits(clock):
    """Nothing can come from anywhere: at the start, and when the tier fails meanwhile."""
    half = make()
    half.scheduler.patience = 2.0
    assert half.ask(Request("a", PROMPT)) == (0, False)
    half = patient()
    request = Request("a", PROMPT)
    assert half.ask(request) == (None, False)
    for command in half.step().commands:
        answer(half, [command], there=False)
    assert half.ask(request) == (None, False)
    half.ended(down={0: frozenset({"dict"})})
    for command in half.step().commands:
        answer(half, [command], there=False)
    assert half.ask(request) == (0, False)


def test_i10_patience_takes_room_like_any_wait(clock):
    """I10: only so many are held back; the others are told at once."""
    half = patient(max_parked_requests=1)
    assert half.ask(Request("a", PROMPT)) == (None, False)
    assert half.ask(Request("b", PROMPT)) == (0, False)


def test_state_alone_is_waited_for(clock):
    """Without full attention there is no block that tells first: the last state is looked for again and again."""
    half = patient(of=groups("state"))
    request = Request("a", PROMPT)
    tracked = half.scheduler._track(request)
    half.scheduler._has_keys(tracked)
    (tail,) = tracked.keys.tail(list(PROMPT), 17).keys

    class Later:
        def __contains__(self, key):
            return clock.now >= 1000.4 and key == tail

    promised, waited, _ = steps_of_waiting(half, request, clock, there=Later())
    assert promised == (17, True)
    assert 0.4 <= waited < 0.5


# -- Writes that don't wait for a step ---------------------------------------------------------------------------------


def writing(num_ranks=1, *, kind=AtOnce, **settings):
    """Let a request save its prompt with its end, and return the half, the save and the step's put commands."""
    half = make(kind=kind, tiers=(DictTier,), num_ranks=num_ranks, **settings)
    request = Request("a", PROMPT)
    begin(half, request, 18)
    half.step()
    metadata = half.start(request, TABLE)
    (save,) = metadata.saves
    return half, save, commands_of(metadata, "put")


def evict_all(half):
    """Let L1 lose what it can."""
    half.scheduler.store.reserve([bytes([number]) * 32 for number in range(200, 200 + 32)])


def test_puts_travel_with_the_save_that_fills_their_slots():
    """The step that saves carries the command, which names the save and just its slots, the tail's with them."""
    half, save, puts = writing()
    assert {put.after for put in puts} == {save.number}
    slots = [slot for put in puts for slot in put.slots]
    assert slots == list(save.parts[0].slots)
    assert [key for put in puts for key in put.keys] == keys_of(half, [save])


def test_without_it_puts_come_in_the_next_step():
    """The control: written when all ranks have saved."""
    half, save, puts = writing(kind=Handovers)
    assert puts == []
    half.ended(saves=[save])
    later = commands_of(half.step(), "put")
    assert sum(len(put.keys) for put in later) == 5
    assert {put.after for put in later} == {None}


@pytest.mark.parametrize("saved_first", [True, False])
def test_c13_what_is_being_written_stays_until_all_tiers_have_answered(saved_first):
    """C13: saved and published, the slots can't be evicted before the answer; whichever comes first, all is free then.

    And nothing is written twice.
    """
    half, save, puts = writing()
    if saved_first:
        half.ended(saves=[save])
        assert half.pins == 5
        evict_all(half)
        assert all(key in half.scheduler.store.allocator._index for put in puts for key in put.keys)
        answer(half, puts)
    else:
        answer(half, puts)
        assert half.reserved == 5
        half.ended(saves=[save])
    assert half.pins == 0
    assert commands_of(half.step(), "put") == []
    assert half.scheduler.stats.get("l2_writes_dropped:dict") == 0


def test_b3_each_ranks_answer_counts():
    """B3: with two ranks, a slot is held until both have written and both have saved."""
    half, save, puts = writing(2)
    half.ended(saves=[save], ranks=1)
    answer(half, puts, ranks=1)
    assert (half.reserved, half.pins) == (5, 0)
    half.ended(saves=[save], ranks=1)
    assert (half.reserved, half.pins) == (0, 5)
    answer(half, puts, ranks=1)
    assert half.pins == 0
    assert commands_of(half.step(), "put") == []


def test_what_a_tier_didnt_take_is_written_when_it_is_published():
    """A write that failed before the save is known is made again, from slots that are pinned."""
    half, save, puts = writing()
    answer(half, puts, there=False)
    half.ended(saves=[save])
    again = commands_of(half.step(), "put")
    assert sum(len(put.keys) for put in again) == 5
    assert {put.after for put in again} == {None}
    answer(half, again)
    assert half.pins == 0


def test_a_save_that_fails_leaves_nothing():
    """Its slots are free, its keys aren't found, and the writes' answers change nothing; the next save is whole."""
    half, save, puts = writing()
    answer(half, puts, there=False)  # as a worker does whose save failed
    half.ended(saves=[save], failed=True)
    assert (half.used, half.pins, half.reserved) == (0, 0, 0)
    assert commands_of(half.step(), "put") == []
    request = Request("b", PROMPT)
    begin(half, request, 18)
    half.step()
    metadata = half.start(request, [11, 12, 13, 14, 15])
    assert len(keys_of(half, metadata.saves)) == 5
    assert sum(len(put.keys) for put in commands_of(metadata, "put")) == 5


def test_a_save_that_fails_before_its_writes_are_answered():
    """Answers that come after all is over are taken, and nothing is held for ever."""
    half, save, puts = writing()
    half.ended(saves=[save], failed=True)
    answer(half, puts, there=False)
    assert (half.used, half.pins, half.reserved) == (0, 0, 0)


def test_c13_a_save_that_one_rank_fails_while_another_writes():
    """C13: the rank whose save is good reads its slots still, so nobody else gets them until it has answered."""
    half, save, puts = writing(2)
    half.ended(saves=[save], ranks=1, failed=True)
    half.ended(saves=[save], ranks=1)
    given = half.scheduler.store.reserve([bytes([number]) * 32 for number in range(200, 200 + 32)])
    taken = {ref.slot for ref in given if ref is not None}
    assert not taken & {slot for put in puts for slot in put.slots}
    answer(half, puts, there=False)
    assert half.pins == 0


def test_d9_c13_a_reset_while_a_save_is_written():
    """D9, C13: what is written is of no use any more, and yet its slots are nobody else's until that has ended."""
    half, save, puts = writing()
    half.scheduler.reset()
    half.ended(saves=[save])
    given = half.scheduler.store.reserve([bytes([number]) * 32 for number in range(200, 200 + 32)])
    taken = {ref.slot for ref in given if ref is not None}
    assert not taken & {slot for put in puts for slot in put.slots}
    answer(half, puts)
    assert half.pins == 0


def test_writes_at_once_have_the_budget_of_all_writes():
    """What is beyond it is left to be written when it is published, if there is room then; it isn't counted twice."""
    half = make(kind=AtOnce, tiers=(DictTier,), num_slots=8, l2_write_inflight_per_rank=1 << 30)
    request = Request("a", PROMPT)
    begin(half, request, 18)
    metadata = half.start(request, TABLE)
    puts = commands_of(metadata, "put")
    assert sum(len(put.keys) for put in puts) == 2  # a quarter of L1
    assert half.scheduler.stats.get("l2_writes_dropped:dict") == 0
    answer(half, puts)
    half.ended(saves=metadata.saves)
    later = commands_of(half.step(), "put")
    assert sum(len(put.keys) for put in later) == 2
    assert not {key for put in puts for key in put.keys} & {key for put in later for key in put.keys}
    assert half.scheduler.stats.get("l2_writes_dropped:dict") == 1
    answer(half, later)
    assert half.pins == 0


def test_a_tier_that_is_down_gets_no_writes_at_once():
    """What it missed is written when it is published, if it works by then."""
    half = make(kind=AtOnce, tiers=(DictTier,))
    half.ended(down={0: frozenset({"dict"})})
    request = Request("a", PROMPT)
    begin(half, request, 18)
    metadata = half.start(request, TABLE)
    assert commands_of(metadata, "put") == []
    half.ended(down={0: frozenset()})
    half.ended(saves=metadata.saves)
    assert sum(len(put.keys) for put in commands_of(half.step(), "put")) == 5


@pytest.mark.parametrize("policy", ["hits", "evicted"])
def test_other_policies_write_nothing_at_once(policy):
    """What isn't written when it is saved isn't written at once."""
    half, save, puts = writing(l2_write_policy=policy)
    assert puts == []
    half.ended(saves=[save])
    assert half.pins == 0


# -- What subclasses are told ------------------------------------------------------------------------------------------


def test_requests_are_prepared_once_and_answered_at_their_end():
    """Each request object once, also one that comes under a known id; the answer is that of the subclass."""
    prepared, answered = [], []

    class Telling(SchedulerHalf):
        def prepare(self, tracked):
            prepared.append(tracked.request)

        def answer(self, tracked):
            assert tracked.request_id in self._tracked
            answered.append(tracked.request)
            return {"of": tracked.request_id}

    half = make(kind=Telling)
    one, two = Request("a", PROMPT), Request("a", range(9))
    for _ in range(3):
        half.ask(one)
    half.ask(two)
    assert [id(request) for request in prepared] == [id(one), id(two)]
    assert half.scheduler.finish(one) is None
    assert half.scheduler.finish(two) == {"of": "a"}
    assert half.scheduler.finish(two) is None
    assert [id(request) for request in answered] == [id(two)]
    assert half.scheduler.num_tracked_requests == 0


def test_by_default_there_is_no_answer():
    """Other connectors' requests end as they did."""
    half = Half()
    request = Request("a", PROMPT)
    half.ask(request)
    assert half.scheduler.finish(request) is None
