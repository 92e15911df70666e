"""Which blocks are saved after a step, for every kind of KV-cache group."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplug.saves import SavePlanner
from support.scheduled_steps import groups


def run(model, *steps):
    """Plan steps of one request, each (computed, known) or with `exact` and `starts`; return the ranges of each."""
    planner = SavePlanner(model)
    progress = planner.start()
    planned = []
    for number, (computed, known, *more) in enumerate(steps):
        exact, starts = more or (True, number == 0)
        planned.append(planner.plan(progress, computed, known, exact=exact, starts=starts))
    return planned


def test_full_attention_saves_each_block_once():
    """Blocks are saved in the step that fills them, and what vLLM had itself with the first."""
    assert run(groups("full"), (0, 10), (10, 11), (11, 12), (12, 21)) == [[(0, 0, 2)], [], [(0, 2, 3)], [(0, 3, 5)]]
    assert run(groups("full"), (8, 10), (10, 12)) == [[(0, 0, 2)], [(0, 2, 3)]]


def test_b13_every_way_to_cut_a_prompt():
    """B13: however a prompt is cut into chunks, all of its full blocks are saved, each once."""

    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=10))
    def check(chunks):
        ends = [sum(chunks[: number + 1]) for number in range(len(chunks))]
        planned = run(groups("full", ("full", 8, 0)), *zip([0, *ends], ends, strict=False))
        for group, size in ((0, 4), (1, 8)):
            saved = [block for ranges in planned for g, a, b in ranges if g == group for block in range(a, b)]
            assert saved == list(range(ends[-1] // size))

    check()


def test_b14_c15_a_block_that_was_full_of_drafts_is_saved_when_they_are_accepted():
    """B14, C15: the block's tokens weren't known when its KV was computed; known, it is saved, behind a window too."""
    model = groups("full", ("window", 4, 8))
    # 6 tokens and three drafts are computed, then it turns out that two were accepted.
    planned = run(model, (0, 6), (6, 7, False, False), (9, 10, True, False))
    assert planned == [[(0, 0, 1), (1, 0, 1)], [], [(0, 1, 2), (1, 1, 2)]]


def test_windows_save_what_is_the_requests_own_still():
    """A request that starts has all blocks; later, those behind the window may be somebody else's.

    One block more than the step computes is taken, for tokens that were accepted late.
    """
    window = groups(("window", 4, 8))
    assert run(window, (12, 20)) == [[(0, 0, 5)]]  # what is behind the window is the null block
    assert run(window, (0, 8), (40, 48, True, False)) == [[(0, 0, 2)], [(0, 9, 12)]]
    chunk = groups(("chunk", 4, 8))
    assert run(chunk, (0, 4), (4, 12, True, False)) == [[(0, 0, 1)], [(0, 1, 3)]]


def test_state_is_saved_where_a_step_ends():
    """Mode `align`: only the block at whose end a step ends has its state, and only if that is sure."""
    state = groups("state")
    assert run(state, (0, 8), (8, 10), (10, 12), (12, 16, False, False), (16, 20)) == [
        [(0, 1, 2)],
        [],
        [(0, 2, 3)],
        [],
        [(0, 4, 5)],
    ]


def test_state_that_is_passed_isnt_saved_later():
    """Once a step has gone past a block's end, no later step has its state any more."""
    assert run(groups("state"), (0, 10), (10, 11), (11, 14)) == [[], [], []]


def test_state_in_every_block():
    """Mode `all`: each block that a step fills has its state, and those before the step aren't looked at again."""
    assert run(groups("state", every_block=True), (0, 10), (10, 17), (17, 18)) == [[(0, 0, 2)], [(0, 2, 4)], []]
    assert run(groups("state", every_block=True), (8, 17)) == [[(0, 2, 4)]]


def test_groups_of_different_block_sizes():
    """Each group has its own ends of blocks; the next step that saves is the first of any."""
    model = groups(("full", 4, 0), ("state", 8, 0))
    planner = SavePlanner(model)
    assert (planner.alignment, planner.has_state) == (8, True)
    progress = planner.start()
    assert planner.plan(progress, 0, 8, exact=True, starts=True) == [(0, 0, 2), (1, 0, 1)]
    assert progress.next_tokens == 12
    assert planner.plan(progress, 8, 12, exact=True, starts=False) == [(0, 2, 3)]
    assert progress.next_tokens == 16


@pytest.mark.parametrize("kind", ["full", ("window", 4, 8), ("chunk", 4, 8), "state"])
def test_nothing_is_planned_before_the_next_block_is_full(kind):
    """A decode step that fills no block can be told by one comparison."""
    planner = SavePlanner(groups(kind))
    progress = planner.start()
    computed = 0
    for known in range(1, 40):
        before = progress.next_tokens
        planned = planner.plan(progress, computed, known, exact=True, starts=not computed)
        assert bool(planned) == (known % 4 == 0)
        assert not planned or known >= before
        computed = known


def test_a_request_that_starts_again_plans_anew():
    """After a preemption all blocks are other ones: what isn't stored by then is saved from them."""
    planner = SavePlanner(groups("full"))
    progress = planner.start()
    planner.plan(progress, 0, 8, exact=True, starts=True)
    assert planner.plan(planner.start(), 0, 12, exact=True, starts=True) == [(0, 0, 3)]
