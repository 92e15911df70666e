"""Finding the longest prefix that is in L1 in all KV-cache groups, and what is pinned meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplug.request_keys import Tail
from kvplug.scheduled.hits import HitFinder
from kvplug.stats import Stats
from kvplug.store.directed import DirectedStore
from support.scheduled_steps import groups, scheduled_settings

LENGTH = 48

#: Models of every kind: full attention alone, with windows, chunks and state, and without full attention.
MODELS = {
    "full": groups("full"),
    "two sizes": groups(("full", 4, 0), ("full", 8, 0)),
    "window": groups("full", ("window", 4, 6)),
    "window alone": groups(("window", 4, 9)),
    "window of one": groups("full", ("window", 4, 1)),
    "windows of two sizes": groups(("full", 8, 0), ("window", 4, 7), ("window", 16, 20)),
    "chunk": groups("full", ("chunk", 4, 16)),
    "state": groups("full", "state"),
    "state alone": groups("state"),
    "state in large blocks": groups(("full", 4, 0), ("state", 16, 0)),
    "all": groups(("full", 4, 0), ("window", 8, 9), ("chunk", 4, 8), ("state", 8, 0)),
}


class Store(DirectedStore):
    """Notes which keys are asked for."""

    def __init__(self, slots=256):
        super().__init__(scheduled_settings(), Stats(), num_slots=slots, value_bytes=1024, num_ranks=1)
        self.asked = []

    def pin_prefix(self, keys):
        self.asked.append(list(keys))
        return super().pin_prefix(keys)

    def put(self, *keys):
        """Store blocks."""
        self.publish([ref for ref in self.reserve(keys) if ref is not None])

    def take_asked(self):
        """Return how many keys were asked for since the last call."""
        asked, self.asked = self.asked, []
        return sum(map(len, asked))

    @property
    def pins(self):
        return sum(self.allocator._pins)


def keys_of(model, length=LENGTH):
    """Make keys of one request."""
    return [[bytes((group.index, number)) * 16 for number in range(length // group.block_size)] for group in model]


def needed(model, keys, local, tokens):
    """Yield what must be there to go on after so many tokens: position in the group, and key."""
    for group in model:
        first = max(group.first_needed(tokens), local // group.block_size)
        for position in range(first, tokens // group.block_size):
            yield group.index, position, keys[group.index][position]


def longest(model, keys, local, limit, stored, *, dropped=0):
    """Say by trying all how far a hit goes."""
    alignment = HitFinder(model, None, drop_last=False).alignment
    leading = [group for group in model if group.kind == "full"]
    reach = limit
    for group in leading:
        have = local // group.block_size
        while have < limit // group.block_size and keys[group.index][have] in stored:
            have += 1
        reach = min(reach, have * group.block_size)
    end = reach // alignment * alignment - dropped
    for tokens in range(end, local, -alignment):
        if all(key in stored for _, _, key in needed(model, keys, local, tokens)):
            return tokens
    return local


def check_pinned(store, model, keys, hit, *, local, tokens):
    """Fail if anything that a load would need isn't pinned where the hit says."""
    for group, position, key in needed(model, keys, local, tokens):
        ref = hit.slot(group, position)
        assert ref is not None, (group, position)
        assert store.allocator._keys[ref.slot] == key
        assert store.allocator._generation[ref.slot] == ref.generation
        assert store.allocator._pins[ref.slot] > 0


def all_of(keys):
    return [key for of_group in keys for key in of_group]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_all_stored_all_hit(model, drop_last):
    """A prompt that is stored whole is covered up to where blocks of all groups end, and what it needs is pinned."""
    store, keys = Store(), keys_of(model)
    store.put(*all_of(keys))
    finder = HitFinder(model, store, drop_last=drop_last)
    hit = finder.start(0)
    tokens = finder.find(hit, keys, 0, LENGTH)
    assert tokens == LENGTH - (finder.alignment if drop_last else 0)
    check_pinned(store, model, keys, hit, local=0, tokens=tokens)
    finder.release(hit)
    assert store.pins == 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)), drop_last=st.booleans())
def test_a_hit_is_as_long_as_can_be(data, name, drop_last):
    """Whatever is stored, and wherever vLLM's own hit ends: the first answer is what trying all lengths gives."""
    model = MODELS[name]
    store, keys = Store(), keys_of(model)
    gaps = data.draw(st.sets(st.sampled_from(all_of(keys)), max_size=4))
    stored = set(all_of(keys)) - gaps
    store.put(*sorted(stored))
    finder = HitFinder(model, store, drop_last=drop_last)
    local = data.draw(st.integers(0, LENGTH // finder.alignment)) * finder.alignment
    limit = data.draw(st.integers(0, LENGTH))
    hit = finder.start(local)
    tokens = finder.find(hit, keys, local, limit)
    assert tokens == longest(model, keys, local, limit, stored, dropped=finder.alignment if drop_last else 0)
    check_pinned(store, model, keys, hit, local=local, tokens=tokens)
    finder.release(hit)
    assert store.pins == 0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)), drop_last=st.booleans())
def test_b9_b10_lookups_in_any_order(data, name, drop_last):
    """B9, B10: local hits that grow and shrink, blocks that come and go: each answer is pinned, and nothing is left.

    Asked twice in a row, the answer is the same.
    """
    model = MODELS[name]
    store, keys = Store(), keys_of(model)
    names = all_of(keys)
    finder = HitFinder(model, store, drop_last=drop_last)
    step = data.draw(st.sampled_from([1, finder.alignment]))
    stored = data.draw(st.sets(st.sampled_from(names)))
    store.put(*sorted(stored))
    hit = finder.start(data.draw(st.integers(0, LENGTH // step)) * step)
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["find", "find", "publish", "evict"])):
            case "find":
                local = data.draw(st.integers(0, LENGTH // step)) * step
                limit = data.draw(st.sampled_from([LENGTH, LENGTH - 1]))
                tokens = finder.find(hit, keys, local, limit)
                pins = store.pins
                check_pinned(store, model, keys, hit, local=local, tokens=tokens)
                assert tokens <= max(local, longest(model, keys, local, LENGTH, set(names)))
                assert finder.find(hit, keys, local, limit) == tokens
                assert store.pins == pins
            case "publish":
                store.put(*data.draw(st.lists(st.sampled_from(names), max_size=6)))
            case "evict":
                for key in data.draw(st.lists(st.sampled_from(names), max_size=6)):
                    slot = store.allocator._index.get(key)
                    if slot is not None and not store.allocator._pins[slot]:
                        store.allocator.discard([key])
    finder.release(hit)
    assert store.pins == 0


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_b9_one_call_or_many(model):
    """B9: pins after many calls with the same local hit are those of one."""
    store, keys = Store(), keys_of(model)
    store.put(*all_of(keys))
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    first = finder.find(hit, keys, 0, LENGTH)
    pins = store.pins
    for _ in range(5):
        assert finder.find(hit, keys, 0, LENGTH) == first
    assert store.pins == pins


def test_lookups_cost_only_what_is_new():
    """What is pinned isn't looked up again, and of what is missing only the first block is."""
    (model, store) = (MODELS["window"], Store())
    keys = keys_of(model)
    store.put(*keys[0][:6], *keys[1][:6])
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    assert finder.find(hit, keys, 0, LENGTH) == 24
    first = store.take_asked()
    assert first <= len(keys[0]) + 1 + 3
    for _ in range(3):
        finder.find(hit, keys, 0, LENGTH)
        assert store.take_asked() == 1  # the first block that is missing
    store.put(keys[0][6], keys[1][6])
    assert finder.find(hit, keys, 0, LENGTH) == 28
    assert store.take_asked() <= len(keys[0]) - 6 + 3
    store.put(*keys[0], *keys[1])
    assert finder.find(hit, keys, 0, LENGTH) == LENGTH
    store.take_asked()
    finder.find(hit, keys, 0, LENGTH)
    assert store.take_asked() == 0


def test_growing_local_hits_cost_nothing():
    """VLLM's own cache has come to have more, or less again: what is pinned still covers it."""
    store, model = Store(), MODELS["full"]
    keys = keys_of(model)
    store.put(*keys[0])
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    finder.find(hit, keys, 0, LENGTH)
    store.take_asked()
    for local in (8, 20, LENGTH, 20, 0):
        assert finder.find(hit, keys, local, LENGTH) == LENGTH
    assert store.take_asked() == 0


def test_a_shrinking_local_hit_pins_what_comes_before():
    """VLLM's own cache has lost blocks: they are pinned if they are stored, else there is no hit."""
    store, model = Store(), MODELS["full"]
    keys = keys_of(model)
    store.put(*keys[0][2:])
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(16)
    assert finder.find(hit, keys, 16, LENGTH) == LENGTH
    assert store.pins == 8
    assert finder.find(hit, keys, 8, LENGTH) == LENGTH
    assert store.pins == 10
    assert finder.find(hit, keys, 4, LENGTH) == 4
    assert store.pins == 0


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_local_hit_that_is_lost_is_not_promised_unseen(model):
    """VLLM had it all, nothing was found beyond, and then its blocks were evicted: only what is stored counts."""
    store, keys = Store(), keys_of(model)
    finder = HitFinder(model, store, drop_last=False)
    for group in model:
        if group.kind == "full":
            store.put(*keys[group.index])
    hit = finder.start(LENGTH)
    assert finder.find(hit, keys, LENGTH, LENGTH) == LENGTH
    tokens = finder.find(hit, keys, 0, LENGTH)
    check_pinned(store, model, keys, hit, local=0, tokens=tokens)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_b8_a_local_hit_beyond_all_that_is_stored(model):
    """B8: vLLM has more than is stored: nothing is found, and nothing stays pinned that is of no use."""
    store, keys = Store(), keys_of(model)
    store.put(*(key for of_group in keys for key in of_group[: len(of_group) // 2]))
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    finder.find(hit, keys, 0, LENGTH)
    for local in (32, 48):
        assert finder.find(hit, keys, local, LENGTH) == local
    assert store.pins == 0


def test_what_is_wanted_from_l2_first_and_then():
    """First the runs of groups that lead; then, given how far they go, a window's blocks, and the last state."""
    model = MODELS["all"]
    store, keys = Store(), keys_of(model)
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(8)
    finder.find(hit, keys, 8, LENGTH)
    assert finder.wanted_first(hit, keys, LENGTH) == [(keys[0][2:], False)]
    assert finder.wanted_then(hit, keys, LENGTH) == []
    store.put(*keys[0][:8])
    assert finder.wanted_then(hit, keys, LENGTH) == [(keys[1][3:4], False), ([], False), (keys[3][1:4], True)]


def test_what_is_missing_is_named():
    """The next block of a group that leads, and the others' last blocks: what would make a hit longer."""
    model = MODELS["window"]
    store, keys = Store(), keys_of(model)
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    store.put(*keys[0][:4])
    finder.find(hit, keys, 0, LENGTH)
    assert list(finder.missing(hit, keys, LENGTH)) == [keys[0][4], keys[1][3]]
    store.put(*keys[0], *keys[1])
    finder.find(hit, keys, 0, LENGTH)
    assert list(finder.missing(hit, keys, LENGTH)) == []


def test_what_is_taken_is_somebody_elses_to_unpin():
    """After `take` the hit holds nothing, and its release changes nothing."""
    store, model = Store(), MODELS["all"]
    keys = keys_of(model)
    store.put(*all_of(keys))
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    finder.find(hit, keys, 0, LENGTH)
    refs = finder.take(hit)
    finder.release(hit)
    assert len(refs) == store.pins > 0
    store.unpin(refs)
    assert store.pins == 0


def test_draft_layers_last_block_is_left_out():
    """With draft layers a hit ends a block before what is stored."""
    store, model = Store(), MODELS["full"]
    keys = keys_of(model)
    finder = HitFinder(model, store, drop_last=True)
    store.put(keys[0][0])
    assert finder.find(finder.start(0), keys, 0, LENGTH) == 0
    store.put(*keys[0][:3])
    assert finder.find(finder.start(0), keys, 0, LENGTH) == 8


# -- Hits that end in a tail -------------------------------------------------------------------------------------------

#: Which tokens a prompt has: ends within the blocks of some groups, or of all.
PROMPT = 43


def tail_of(model, tokens=PROMPT):
    """Make the keys of where a prompt ends."""
    return Tail(tokens, tuple(bytes((group.index, 255)) * 16 if tokens % group.block_size else None for group in model))


def needed_at(model, keys, tail, local, tokens):
    """Yield what must be there to go on after so many tokens, where that may be where the prompt ends."""
    yield from needed(model, keys, local, tokens)
    if tokens == tail.tokens:
        for group in model:
            if tail.keys[group.index] is not None:
                yield group.index, tokens // group.block_size, tail.keys[group.index]


def longest_at(model, keys, tail, local, stored, *, dropped=0):
    """Say by trying all how far a hit goes, if it may end where the prompt does."""
    if local < tail.tokens and all(key in stored for _, _, key in needed_at(model, keys, tail, local, tail.tokens)):
        return tail.tokens
    return longest(model, keys, local, tail.tokens, stored, dropped=dropped)


def check_pinned_at(store, model, keys, tail, hit, *, local, tokens):
    for group, position, key in needed_at(model, keys, tail, local, tokens):
        ref = hit.slot(group, position)
        assert ref is not None, (group, position)
        assert store.allocator._keys[ref.slot] == key
        assert store.allocator._pins[ref.slot] > 0


def all_with(keys, tail):
    return [*all_of(keys), *(key for key in tail.keys if key is not None)]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 16, 17, 40, 43, 47, 48])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_j5_a_prompt_that_is_stored_to_its_end_is_covered_to_its_end(model, tokens):
    """J5: all of it, wherever it ends, and each block that is needed is pinned where the hit says."""
    store, keys, tail = Store(), keys_of(model), tail_of(model, tokens)
    store.put(*all_with(keys, tail))
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    assert finder.find(hit, keys, 0, tokens, tail) == tokens
    check_pinned_at(store, model, keys, tail, hit, local=0, tokens=tokens)
    finder.release(hit)
    assert store.pins == 0


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_any_block_that_is_missing_ends_it_before(model):
    """Without any one of those that are needed, leader's or follower's, tail or not, the hit is that of full blocks."""
    keys, tail = keys_of(model), tail_of(model)
    everything = all_with(keys, tail)
    for _, _, gap in needed_at(model, keys, tail, 0, PROMPT):
        store = Store()
        stored = [key for key in everything if key != gap]
        store.put(*stored)
        finder = HitFinder(model, store, drop_last=False)
        hit = finder.start(0)
        tokens = finder.find(hit, keys, 0, PROMPT, tail)
        assert tokens == longest(model, keys, 0, PROMPT, set(stored)) < PROMPT
        check_pinned(store, model, keys, hit, local=0, tokens=tokens)
        finder.release(hit)
        assert store.pins == 0


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_without_a_tail_to_look_for_there_is_none(model):
    """A caller that doesn't ask for the tail is promised full blocks, though the tail is stored."""
    store, keys, tail = Store(), keys_of(model), tail_of(model)
    store.put(*all_with(keys, tail))
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    assert finder.find(hit, keys, 0, PROMPT) == PROMPT // finder.alignment * finder.alignment
    finder.release(hit)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)), drop_last=st.booleans())
def test_a_hit_with_a_tail_is_as_long_as_can_be(data, name, drop_last):
    """Whatever is stored, wherever the prompt and vLLM's own hit end: the answer is what trying all lengths gives."""
    model = MODELS[name]
    tail = tail_of(model, data.draw(st.integers(1, LENGTH)))
    store, keys = Store(), keys_of(model)
    everything = all_with(keys, tail)
    stored = set(everything) - data.draw(st.sets(st.sampled_from(everything), max_size=3))
    store.put(*sorted(stored))
    finder = HitFinder(model, store, drop_last=drop_last)
    local = data.draw(st.integers(0, LENGTH // finder.alignment)) * finder.alignment
    hit = finder.start(local)
    tokens = finder.find(hit, keys, local, tail.tokens, tail)
    assert tokens == longest_at(model, keys, tail, local, stored, dropped=finder.alignment if drop_last else 0)
    check_pinned_at(store, model, keys, tail, hit, local=local, tokens=tokens)
    pins = store.pins
    assert finder.find(hit, keys, local, tail.tokens, tail) == tokens
    assert store.pins == pins
    finder.release(hit)
    assert store.pins == 0


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)))
def test_b9_b10_lookups_with_a_tail_in_any_order(data, name):
    """B9, B10: local hits that grow and shrink while blocks and tails come and go: what is promised is pinned.

    And in the end it is found if it is there: a hit that was tried in vain before is tried again.
    """
    model = MODELS[name]
    tail = tail_of(model, data.draw(st.integers(1, LENGTH)))
    store, keys = Store(), keys_of(model)
    everything = all_with(keys, tail)
    finder = HitFinder(model, store, drop_last=False)
    store.put(*sorted(data.draw(st.sets(st.sampled_from(everything)))))
    locals_ = st.integers(0, tail.tokens // finder.alignment).map(lambda number: number * finder.alignment)
    local = data.draw(locals_)
    hit = finder.start(local)
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["find", "find", "want", "publish", "evict"])):
            case "find":
                local = data.draw(locals_)
                tokens = finder.find(hit, keys, local, tail.tokens, tail)
                check_pinned_at(store, model, keys, tail, hit, local=local, tokens=tokens)
            case "want":  # pins what leads, as waiting does
                finder.wanted_first(hit, keys, tail.tokens, tail)
                finder.wanted_then(hit, keys, tail.tokens, tail)
                list(finder.missing(hit, keys, tail.tokens, tail))
            case "publish":
                store.put(*data.draw(st.lists(st.sampled_from(everything), max_size=6)))
            case "evict":
                for key in data.draw(st.lists(st.sampled_from(everything), max_size=6)):
                    slot = store.allocator._index.get(key)
                    if slot is not None and not store.allocator._pins[slot]:
                        store.allocator.discard([key])
    store.put(*everything)
    if local < tail.tokens:
        assert finder.find(hit, keys, local, tail.tokens, tail) == tail.tokens
        check_pinned_at(store, model, keys, tail, hit, local=local, tokens=tail.tokens)
    finder.release(hit)
    assert store.pins == 0


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_b9_a_tail_is_pinned_once(model):
    """B9: asked again, and with what is wanted in between, the pins are those of one call."""
    store, keys, tail = Store(), keys_of(model), tail_of(model)
    store.put(*all_with(keys, tail))
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    finder.find(hit, keys, 0, PROMPT, tail)
    pins = store.pins
    for key in tail.keys:
        if key is not None:
            assert store.allocator._pins[store.allocator._index[key]] == 1
    for _ in range(3):
        assert finder.find(hit, keys, 0, PROMPT, tail) == PROMPT
        finder.wanted_then(hit, keys, PROMPT, tail)
        assert list(finder.missing(hit, keys, PROMPT, tail)) == []
    assert store.pins == pins
    refs = finder.take(hit)
    assert len(refs) == pins
    finder.release(hit)
    assert store.pins == pins
    store.unpin(refs)
    assert store.pins == 0


def test_a_tail_that_comes_later_costs_one_look():
    """Of a request that waits for its tail, each call asks for one key, and none of a follower's blocks."""
    model, store = MODELS["window"], Store()
    keys, tail = keys_of(model), tail_of(model)
    store.put(*keys[0], *keys[1])
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    assert finder.find(hit, keys, 0, PROMPT, tail) == 40
    store.put(tail.keys[0])
    finder.find(hit, keys, 0, PROMPT, tail)
    store.take_asked()
    for _ in range(3):
        assert finder.find(hit, keys, 0, PROMPT, tail) == 40
        assert store.take_asked() == 0
    store.put(tail.keys[1])
    assert finder.find(hit, keys, 0, PROMPT, tail) == PROMPT


def test_a_local_hit_that_shrinks_below_a_tail():
    """VLLM had all full blocks, and only the tail was pinned: what comes before is pinned now, or there is no hit."""
    store, model = Store(), MODELS["window"]
    keys, tail = keys_of(model), tail_of(model)
    store.put(*keys[0][4:], *keys[1], *tail.keys)
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(40)
    assert finder.find(hit, keys, 40, PROMPT, tail) == PROMPT
    assert store.pins == 2
    assert finder.find(hit, keys, 16, PROMPT, tail) == PROMPT
    check_pinned_at(store, model, keys, tail, hit, local=16, tokens=PROMPT)
    assert finder.find(hit, keys, 12, PROMPT, tail) == 12
    assert store.pins == 0
    store.put(*keys[0])
    assert finder.find(hit, keys, 12, PROMPT, tail) == PROMPT
    check_pinned_at(store, model, keys, tail, hit, local=12, tokens=PROMPT)


def test_a_local_hit_that_grows_keeps_the_tail():
    """VLLM's own cache has come to have more: the tail is still promised, and nothing is asked for."""
    store, model = Store(), MODELS["full"]
    keys, tail = keys_of(model), tail_of(model)
    store.put(*keys[0], *tail.keys)
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    finder.find(hit, keys, 0, PROMPT, tail)
    store.take_asked()
    for local in (8, 40, 20, 0):
        assert finder.find(hit, keys, local, PROMPT, tail) == PROMPT
        check_pinned_at(store, model, keys, tail, hit, local=local, tokens=PROMPT)
    assert store.take_asked() == 0


def test_a_tail_shorter_than_the_local_hit_is_no_gain():
    """VLLM has as much as the prompt has: nothing is promised, and what the tail needs isn't pinned for nothing."""
    store, model = Store(), MODELS["full"]
    keys, tail = keys_of(model), tail_of(model, 3)
    store.put(*keys[0], *tail.keys)
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(4)
    assert finder.find(hit, keys, 4, 3, tail) == 4
    assert store.pins == 0


def test_a_tail_of_unequal_blocks_ends_in_some_of_them():
    """Where a prompt ends with a block of one group and within one of another, only the other has a tail."""
    model = MODELS["two sizes"]
    store, keys, tail = Store(), keys_of(model), tail_of(model, 44)
    assert [key is None for key in tail.keys] == [True, False]
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    store.put(*keys[0][:10], *keys[1], *tail.keys[1:])
    assert finder.find(hit, keys, 0, 44, tail) == 40
    assert list(finder.missing(hit, keys, 44, tail)) == [keys[0][10], tail.keys[1]]
    store.put(keys[0][10])
    assert finder.find(hit, keys, 0, 44, tail) == 44
    check_pinned_at(store, model, keys, tail, hit, local=0, tokens=44)
    assert list(finder.missing(hit, keys, 44, tail)) == []


def test_state_needs_only_its_tail():
    """With recurrent state nothing but the tail's own block of it is needed; without that, the last one before."""
    model = MODELS["state"]
    store, keys, tail = Store(), keys_of(model), tail_of(model)
    store.put(*keys[0], *tail.keys, keys[1][4])
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    assert finder.find(hit, keys, 0, PROMPT, tail) == PROMPT
    assert (hit.first[1], len(hit.refs[1])) == (10, 1)
    finder.release(hit)
    store.allocator.discard([tail.keys[1]])
    hit = finder.start(0)
    assert finder.find(hit, keys, 0, PROMPT, tail) == 20
    assert (hit.first[1], len(hit.refs[1])) == (4, 1)


def test_what_is_wanted_from_l2_with_a_tail():
    """First, leaders' blocks with the tail behind; then, as far as leaders go, followers', with it if they reach it."""
    model = MODELS["all"]
    store, keys, tail = Store(), keys_of(model), tail_of(model)
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(8)
    finder.find(hit, keys, 8, PROMPT, tail)
    assert finder.wanted_first(hit, keys, PROMPT, tail) == [([*keys[0][2:10], tail.keys[0]], False)]
    assert finder.wanted_then(hit, keys, PROMPT, tail) == []
    store.put(*keys[0][:10])
    # The leader ends before the tail: nobody's tail is of use.
    assert finder.wanted_then(hit, keys, PROMPT, tail) == [(keys[1][4:5], False), ([], False), (keys[3][1:5], True)]
    store.put(tail.keys[0])
    assert finder.wanted_then(hit, keys, PROMPT, tail) == [
        ([keys[1][4], tail.keys[1]], False),
        ([tail.keys[2]], False),
        ([*keys[3][1:5], tail.keys[3]], True),
    ]
    finder.release(hit)
    assert store.pins == 0


def test_what_is_wanted_from_l2_without_leaders():
    """A window's run, or any state: with the tail at its end."""
    for name, first, then in (("window alone", True, False), ("state alone", False, True)):
        model = MODELS[name]
        store, keys, tail = Store(), keys_of(model), tail_of(model)
        finder = HitFinder(model, store, drop_last=False)
        hit = finder.start(0)
        finder.find(hit, keys, 0, PROMPT, tail)
        wanted = [([*keys[0][:10], tail.keys[0]], name == "state alone")]
        assert finder.wanted_first(hit, keys, PROMPT, tail) == (wanted if first else [])
        assert finder.wanted_then(hit, keys, PROMPT, tail) == (wanted if then else [])


def test_a_tail_that_is_missing_is_named():
    """Leader's once its blocks are there, and followers': that tells what another request is saving now."""
    model = MODELS["window"]
    store, keys, tail = Store(), keys_of(model), tail_of(model)
    finder = HitFinder(model, store, drop_last=False)
    hit = finder.start(0)
    store.put(*keys[0][:4], *keys[1][:4])
    finder.find(hit, keys, 0, PROMPT, tail)
    assert list(finder.missing(hit, keys, PROMPT, tail)) == [keys[0][4], tail.keys[1]]
    store.put(*keys[0], *keys[1])
    finder.find(hit, keys, 0, PROMPT, tail)
    assert list(finder.missing(hit, keys, PROMPT, tail)) == [tail.keys[0], tail.keys[1]]
    assert list(finder.missing(hit, keys, PROMPT)) == []
    store.put(tail.keys[0])
    finder.find(hit, keys, 0, PROMPT, tail)
    assert tail.keys[1] in list(finder.missing(hit, keys, PROMPT, tail))
    store.put(tail.keys[1])
    finder.find(hit, keys, 0, PROMPT, tail)
    assert list(finder.missing(hit, keys, PROMPT, tail)) == []


def test_j5_draft_layers_dont_cost_the_tail():
    """J5: the token after a prompt is computed anyway, so a hit that ends with the prompt isn't cut for draft layers.

    Without its tail it is, as ever.
    """
    store, model = Store(), MODELS["full"]
    keys, tail = keys_of(model), tail_of(model)
    finder = HitFinder(model, store, drop_last=True)
    store.put(*keys[0])
    hit = finder.start(0)
    assert finder.find(hit, keys, 0, PROMPT, tail) == 36
    store.put(*tail.keys)
    assert finder.find(hit, keys, 0, PROMPT, tail) == PROMPT
