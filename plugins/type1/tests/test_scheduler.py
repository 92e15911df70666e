"""Scheduler half of type1: what a step offers to load and asks to save."""

from __future__ import annotations

import pickle

import pytest

from kvplug_type1.scheduler import Type1Scheduler
from support.type1_steps import Request, full, make, output, start


def test_a_prompt_is_offered_and_saved():
    """All full blocks of a prompt may be loaded and are saved, the partial one is neither."""
    metadata = start(make(), Request("a", range(10)), [5, 6, 7])
    (load,), (save,) = metadata.loads, metadata.saves
    assert metadata.candidates == ("a",)
    assert load.num_computed_tokens == 0
    assert load.block_ids == save.block_ids == (5, 6)
    assert load.keys == save.keys
    assert len(set(load.keys)) == 2


def test_b1_a_prompt_of_one_block_is_not_offered_for_nothing():
    """A load that would leave nothing to skip isn't offered: one token is always computed."""
    assert make_loads(Request("a", [1])) == ()
    assert make_loads(Request("a", range(3))) == ()
    assert make_loads(Request("a", range(4))) == ((5,),)  # three of its four tokens are skipped
    assert make_loads(Request("a", range(5))) == ((5,),)


def make_loads(request):
    return tuple(load.block_ids for load in start(make(), request, [5, 6, 7]).loads)


def test_a_hit_of_vllms_own_moves_the_start():
    """Blocks that vLLM has aren't loaded, but are saved if they are missing."""
    metadata = start(make(), Request("a", range(14)), [5, 6, 7, 8], computed=4)
    assert metadata.loads[0].block_ids == (6, 7)
    assert metadata.loads[0].num_computed_tokens == 4
    assert metadata.saves[0].block_ids == (5, 6, 7)


def test_b13_chunks_end_inside_blocks():
    """A chunk loads and saves the blocks it completes; the next one starts with the block it is in."""
    scheduler = make()
    request = Request("a", range(14))
    first = start(scheduler, request, [5, 6], scheduled=6)
    assert first.loads[0].block_ids == first.saves[0].block_ids == (5,)
    second = scheduler.build_metadata(output({"a": 8}, cached=[("a", 6, [7, 8])]))
    (load,) = second.loads
    assert (load.num_computed_tokens, load.block_ids) == (6, (6, 7))
    assert second.saves[0].block_ids == (6, 7)


def test_keys_are_those_of_the_tokens():
    """Chunked or whole, resumed or fresh, the same tokens give the same keys (C5)."""
    whole = start(make(), Request("a", range(12)), [1, 2, 3]).saves[0].keys
    scheduler = make()
    request = Request("b", range(8))
    chunks = start(scheduler, request, [4, 5], scheduled=5).saves[0].keys
    request.all_token_ids += [8, 9, 10, 11]  # generated
    scheduler.build_metadata(output({}, preempted={"b"}))
    resumed = scheduler.build_metadata(output({"b": 12}, cached=[("b", 0, [7, 8, 9])], resumed=["b"]))
    assert resumed.saves[0].keys == whole
    assert chunks == whole[:1]
    assert resumed.loads[0].block_ids == (7, 8, 9)


def test_decode_saves_a_block_when_it_is_full():
    """Most decode steps ask for nothing; the one that fills a block saves it and loads nothing."""
    scheduler = make()
    request = Request("a", range(6))
    start(scheduler, request, [5, 6])
    saved = []
    for computed in range(6, 13):
        request.all_token_ids.append(computed)
        metadata = scheduler.build_metadata(
            output({"a": 1}, cached=[("a", computed, [7 + computed] if computed % 4 == 0 else None)])
        )
        assert not metadata.candidates
        saved += [s.block_ids for s in metadata.saves]
    assert saved == [(6,), (15,)]


def test_c15_tokens_that_are_not_known_yet_are_not_saved():
    """Asynchronous scheduling runs ahead of the token list: a block is saved once all its tokens are known."""
    scheduler = make()
    request = Request("a", range(7))
    start(scheduler, request, [5, 6])
    ahead = scheduler.build_metadata(output({"a": 1}, cached=[("a", 7, None)]))
    assert not ahead.saves
    request.all_token_ids.append(99)  # the token at position 7
    later = scheduler.build_metadata(output({"a": 1}, cached=[("a", 8, [9])]))
    assert later.saves[0].block_ids == (6,)


def test_b14_rejected_drafts_are_never_saved():
    """Speculative tokens are no part of the token list until they are accepted."""
    scheduler = make()
    request = Request("a", range(5))
    start(scheduler, request, [5, 6])
    request.all_token_ids.append(50)  # sampled; three drafts follow it in the next step
    speculated = scheduler.build_metadata(output({"a": 4}, cached=[("a", 5, [7])], drafts={"a": [1, 2, 3]}))
    assert not speculated.saves
    request.all_token_ids += [1, 60]  # one draft accepted, then another token
    later = scheduler.build_metadata(output({"a": 4}, cached=[("a", 7, None)], drafts={"a": [1, 2, 3]}))
    assert later.saves[0].block_ids == (6,)


def test_drafts_bound_what_is_offered():
    """A step whose tokens before the drafts are all computed has nothing to skip."""
    scheduler = make()
    request = Request("a", range(9))
    scheduler.track(request, 0)
    metadata = scheduler.build_metadata(output({"a": 9}, new=[("a", 0, [1, 2, 3])], drafts={"a": [7] * 8}))
    assert not metadata.loads


def test_c6_block_ids_follow_preemption_and_resume():
    """After a resume, loads and saves name the new blocks."""
    scheduler = make()
    request = Request("a", range(9))
    start(scheduler, request, [1, 2, 3])
    for blocks in ([4, 5, 6], [7, 8, 9]):
        assert scheduler.build_metadata(output({}, preempted={"a"})).saves == ()
        metadata = scheduler.build_metadata(output({"a": 9}, cached=[("a", 0, blocks)], resumed=["a"]))
        assert metadata.loads[0].block_ids == tuple(blocks[:2])
        assert metadata.saves[0].block_ids == tuple(blocks[:2])


def test_the_null_block_is_neither_loaded_nor_saved():
    """Where a window has passed vLLM keeps no KV: block 0 stands there."""
    metadata = start(make(windowed=True), Request("a", range(14)), [0, 6, 7, 8], computed=8)
    assert metadata.saves[0].block_ids == (6, 7)
    metadata = start(make(windowed=True), Request("b", range(14)), [0, 6, 7, 8], computed=2)
    assert not metadata.loads


def test_blocks_behind_a_window_are_not_read_later():
    """A windowed cache may have given them to someone else by then; without a window they are still there."""
    for windowed, expected in ((True, (7, 8)), (False, (5, 6, 7, 8))):
        scheduler = make(windowed=windowed)
        request = Request("a", [])  # nothing known until later
        scheduler.track(request, 0)
        scheduler.build_metadata(output({"a": 12}, new=[("a", 0, [5, 6, 7])]))
        request.all_token_ids += range(16)
        metadata = scheduler.build_metadata(output({"a": 4}, cached=[("a", 12, [8])]))
        assert metadata.saves[0].block_ids == expected


@pytest.mark.parametrize("flags", [{"has_sync_kv_loads": True}, {"old": True}])
def test_what_another_connector_loaded_is_not_ours_to_store(flags):
    """A2: under MultiConnector another connector's load may fail after this step: nothing built on it is stored."""
    scheduler = make()
    metadata = start(scheduler, Request("a", range(12)), [1, 2, 3], computed=8, local=4, **flags)
    assert not metadata.loads
    assert not metadata.saves
    later = scheduler.build_metadata(output({"a": 1}, cached=[("a", 12, [4])]))
    assert not later.saves


def test_a_request_that_may_share_such_blocks_waits_a_step():
    """In the same step another request may already share a block that turns out to be bad."""
    scheduler = make()
    scheduler.track(Request("a", range(12)), 4)
    shares = Request("b", [*range(8), 50, 51, 52])
    scheduler.track(shares, 8)
    step = output({"a": 4, "b": 3}, new=[("a", 8, [1, 2, 3]), ("b", 8, [1, 2, 4])], has_sync_kv_loads=True)
    assert not scheduler.build_metadata(step).saves
    shares.all_token_ids.append(53)
    later = scheduler.build_metadata(output({"b": 1}, cached=[("b", 11, None)]))
    assert later.saves[0].block_ids == (1, 2, 4)


def test_asynchronous_scheduling_learns_of_failed_loads_a_step_later():
    """Two steps are planned before the first one's result is in: who starts in either of them is held that long."""
    scheduler = Type1Scheduler(namespace=bytes(32), groups=[full()], steps_in_flight=2)
    loading, shares, later = Request("a", range(12)), Request("b", range(8)), Request("c", range(9))
    scheduler.track(loading, 4)
    scheduler.track(shares, 4)
    first = output({"a": 4, "b": 4}, new=[("a", 8, [1, 2, 3]), ("b", 4, [1, 2])], has_sync_kv_loads=True)
    assert not scheduler.build_metadata(first).saves
    scheduler.track(later, 8)
    shares.all_token_ids.append(50)
    second = scheduler.build_metadata(output({"b": 1, "c": 1}, new=[("c", 8, [1, 2, 4])], cached=[("b", 8, [5])]))
    assert not second.saves
    third = scheduler.build_metadata(output({"b": 1, "c": 1}, cached=[("b", 9, None), ("c", 9, None)]))
    assert {s.request_id: s.block_ids for s in third.saves} == {"b": (1, 2), "c": (1, 2)}


def test_a_local_hit_inside_a_block_is_no_foreign_load():
    """A local hit may end inside a block, which only the computed tokens tell."""
    metadata = start(make(), Request("a", range(12)), [1, 2, 3], computed=6, local=4)
    assert metadata.loads[0].block_ids == (2, 3)


@pytest.mark.parametrize("fields", [{"prompt_embeds": object()}, {"resumable": True}])
def test_requests_without_an_identity_are_left_alone(fields):
    """What can't be named can't be stored: prompt embeddings, streaming sessions."""
    metadata = start(make(), Request("a", range(12), **fields), [1, 2, 3])
    assert not metadata.loads
    assert not metadata.saves


def test_requests_that_need_every_position_are_saved_but_not_offered():
    """Prompt log-probabilities need every position computed; what is computed is as good as any."""
    metadata = start(make(), Request("a", range(12)), [1, 2, 3], prompt_logprobs=1)
    assert not metadata.loads
    assert metadata.saves
    metadata = start(make(), Request("b", range(12), skip_reading_prefix_cache=True), [1, 2, 3])
    assert not metadata.loads


def test_a_token_that_is_no_id_stops_storing_not_serving(caplog):
    """A request whose tokens can't be keyed is computed like any other."""
    metadata = start(make(), Request("a", [1, 2, -1, 4, 5, 6, 7, 8]), [1, 2])
    assert not metadata.saves
    assert "neither stored nor reused" in caplog.text


def test_b9_b10_lookups_may_come_any_number_of_times():
    """B9, B10: vLLM asks again while a request waits; the answer and the bookkeeping are those of one call."""
    scheduler = make()
    request = Request("a", range(12))
    for local in (0, 8, 4):
        scheduler.track(request, local)
    assert scheduler.num_tracked_requests == 1
    metadata = scheduler.build_metadata(output({"a": 8}, new=[("a", 4, [1, 2, 3])]))
    assert metadata.loads[0].block_ids == (2, 3)


def test_requests_leave_nothing_behind():
    """Finished, aborted and never scheduled requests are forgotten; an id that is used again is a new request."""
    scheduler = make()
    first, second, waiting = Request("a", range(8)), Request("a", range(20, 28)), Request("b", range(8))
    start(scheduler, first, [1, 2])
    scheduler.track(waiting, 0)
    scheduler.track(second, 0)
    scheduler.finish(first)
    assert scheduler.num_tracked_requests == 2
    metadata = scheduler.build_metadata(output({"a": 8}, new=[("a", 0, [3, 4])], finished=["a"]))
    assert metadata.saves[0].block_ids == (3, 4)
    scheduler.finish(waiting)
    scheduler.finish(second)
    scheduler.finish(second)
    scheduler.build_metadata(output({}, finished=["a", "b"]))
    assert scheduler.num_tracked_requests == 0
    assert len(scheduler._tables) == 0


def test_d9_a_reset_reaches_the_workers_with_the_next_step():
    """The count in the metadata rises with each reset."""
    scheduler = make()
    assert scheduler.build_metadata(output({})).reset_count == 0
    assert scheduler.reset()
    assert scheduler.reset()
    assert scheduler.build_metadata(output({})).reset_count == 2


def test_d9_what_runs_during_a_reset_is_not_stored():
    """Blocks that a running request fills after a reset attend to KV from before it: not until it starts again."""
    scheduler = make()
    request = Request("a", range(6))
    start(scheduler, request, [5, 6])
    scheduler.reset()
    request.all_token_ids += [6, 7, 8]
    assert not scheduler.build_metadata(output({"a": 2}, cached=[("a", 6, None)])).saves
    scheduler.build_metadata(output({}, preempted={"a"}))
    again = scheduler.build_metadata(output({"a": 9}, cached=[("a", 0, [1, 2, 3])], resumed=["a"]))
    assert again.saves[0].block_ids == (1, 2)


def test_metadata_travels():
    """Workers are other processes: metadata is pickled, and equal there."""
    metadata = start(make(), Request("a", range(10)), [5, 6, 7])
    assert pickle.loads(pickle.dumps(metadata)) == metadata
