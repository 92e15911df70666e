"""The arithmetic of shortening a step."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from kvplug import compat
from kvplug.requests import BlockTables
from kvplug.steps import StepPlan, merge_counts


def plan(output, block_sizes=(4,)):
    tables = BlockTables()
    tables.update(output)
    return StepPlan(output, tables, block_sizes)


def test_a_new_request_starts_later(new_request, scheduler_output):
    """Computed tokens rise and scheduled ones fall by what is loaded, for that request and in total."""
    output = scheduler_output({"a": 10, "b": 6}, new=[new_request("a", 4, [1, 2, 3, 4]), new_request("b", 0, [5, 6])])
    shorter, skipped, vetoed = plan(output).shorten({"a": 8})
    assert skipped == {"a": 8}
    assert not vetoed
    assert shorter.num_scheduled_tokens == {"a": 2, "b": 6}
    assert shorter.total_num_scheduled_tokens == 8
    assert [r.num_computed_tokens for r in shorter.scheduled_new_reqs] == [12, 0]


def test_a_running_request_starts_later(new_request, scheduler_output):
    """A later chunk of a prefill is shortened in the cached requests, and its new count is known for the device."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8, "b": 1}, new=[new_request("a", 0, [1, 2]), new_request("b", 0, [9])]))
    output = scheduler_output({"a": 8, "b": 1}, cached=[("a", 8, [3, 4]), ("b", 1, None)])
    tables.update(output)
    step = StepPlan(output, tables, (4,))
    shorter, skipped, _ = step.shorten({"a": 4})
    assert shorter.scheduled_cached_reqs.num_computed_tokens == [12, 1]
    assert shorter.num_scheduled_tokens == {"a": 4, "b": 1}
    assert step.running_counts(skipped) == {"a": 12}


def test_a_resumed_request_is_not_running(new_request, scheduler_output):
    """Runners add a resumed request with the output's count: there is nothing on the device to correct."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])]))
    output = scheduler_output({"a": 8}, cached=[("a", 0, [3, 4])], resumed=["a"], preempted=["a"])
    tables.update(output)
    step = StepPlan(output, tables, (4,))
    _, skipped, _ = step.shorten({"a": 4})
    assert skipped == {"a": 4}
    assert step.running_counts(skipped) == {}


def test_the_schedulers_object_is_not_changed(new_request, scheduler_output):
    """In-process executors share it with the scheduler, whose bookkeeping reads it later."""
    tables = BlockTables()
    tables.update(scheduler_output({"b": 4}, new=[new_request("b", 0, [8, 9])]))
    output = scheduler_output(
        {"a": 8, "b": 4},
        new=[new_request("a", 0, [1, 2])],
        cached=[("b", 4, [3])],
        new_block_ids_to_zero=[1, 2, 3],
    )
    before = copy.deepcopy(output)
    tables.update(output)
    shorter, skipped, _ = StepPlan(output, tables, (4,)).shorten({"a": 4, "b": 3})
    assert skipped == {"a": 4, "b": 3}
    assert shorter is not output
    assert output.num_scheduled_tokens == before.num_scheduled_tokens
    assert output.total_num_scheduled_tokens == before.total_num_scheduled_tokens
    assert [r.num_computed_tokens for r in output.scheduled_new_reqs] == [0]
    assert output.scheduled_cached_reqs.num_computed_tokens == [4]
    assert output.new_block_ids_to_zero == [1, 2, 3]


@pytest.mark.parametrize("loaded", [8, 9, 1000])
def test_b1_one_token_is_always_left(new_request, scheduler_output, loaded):
    """Whatever is claimed, the last scheduled token is computed: something must produce the logits."""
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])])
    shorter, skipped, _ = plan(output).shorten({"a": loaded})
    assert skipped == {"a": 7}
    assert shorter.num_scheduled_tokens == {"a": 1}


def test_b14_speculative_tokens_stay_scheduled(new_request, scheduler_output):
    """Draft tokens are the last ones of a request's step, and none of them is skipped, nor the token before them."""
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])], drafts={"a": [7, 7, 7]})
    _, skipped, _ = plan(output).shorten({"a": 8})
    assert skipped == {"a": 4}


@pytest.mark.parametrize("loaded", [0, -3])
def test_b8_nothing_loaded_is_the_same_object(new_request, scheduler_output, loaded):
    """A miss costs no copy, and a negative count is a miss."""
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])])
    shorter, skipped, vetoed = plan(output).shorten({"a": loaded})
    assert shorter is output
    assert not skipped
    assert not vetoed


def test_a_decode_cannot_be_shortened(new_request, scheduler_output):
    """One scheduled token is one token to compute."""
    output = scheduler_output({"a": 1}, new=[new_request("a", 4, [1, 2])])
    assert plan(output).shorten({"a": 1})[0] is output


VETOES = {
    "prompt_logprobs": {"sampling": SimpleNamespace(prompt_logprobs=0)},
    "pooling": {"pooling": SimpleNamespace(task="embed")},
    "prompt_embeds": {"prompt": None},
    "window_replay": {"replay_start": 4},
}


@pytest.mark.parametrize("reason", VETOES)
def test_requests_that_must_not_be_shortened(new_request, scheduler_output, reason):
    """Requests that need every position computed are left alone in all of their steps, and the reason is told."""
    tables = BlockTables()
    first = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2], **VETOES[reason])])
    later = scheduler_output({"a": 8}, cached=[("a", 8, [3, 4])])
    for output in (first, later):
        tables.update(output)
        step = StepPlan(output, tables, (4,))
        shorter, skipped, vetoed = step.shorten({"a": 4})
        assert shorter is output
        assert not skipped
        assert vetoed == {"a": reason}
        assert step.requests()["a"].num_skippable_tokens == 0


def test_encoder_inputs_are_not_skipped(new_request, scheduler_output):
    """A step that runs a request's encoder isn't shortened for it; the next one may be."""
    tables = BlockTables()
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])], encoder_inputs={"a": [0]})
    tables.update(output)
    assert StepPlan(output, tables, (4,)).shorten({"a": 4})[2] == {"a": "encoder_inputs"}
    output = scheduler_output({"a": 8}, cached=[("a", 8, [3, 4])])
    tables.update(output)
    assert StepPlan(output, tables, (4,)).shorten({"a": 4})[1] == {"a": 4}


def test_scheduler_side_loads_are_left_alone(new_request, scheduler_output):
    """When a connector promised tokens to the scheduler in this step, requests that start in it aren't shortened."""
    tables = BlockTables()
    tables.update(scheduler_output({"b": 4}, new=[new_request("b", 0, [8, 9])]))
    output = scheduler_output(
        {"a": 8, "b": 4}, new=[new_request("a", 0, [1, 2])], cached=[("b", 4, [3])], has_sync_kv_loads=True
    )
    tables.update(output)
    _, skipped, vetoed = StepPlan(output, tables, (4,)).shorten({"a": 4, "b": 2})
    assert vetoed == {"a": "scheduler_side_loads"}
    assert skipped == {"b": 2}


def test_a_request_whose_blocks_are_unknown_is_left_alone(scheduler_output):
    """A request that started before the hook was live is computed."""
    output = scheduler_output({"a": 8}, cached=[("a", 8, [3, 4])])
    assert plan(output).shorten({"a": 4})[2] == {"a": "unknown_blocks"}


def test_loaded_blocks_are_neither_zeroed_nor_copied_over(new_request, scheduler_output):
    """Blocks that hold loaded KV leave the runner's zero and copy lists; others and the null block's stay."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    output = scheduler_output(
        {"a": 11, "b": 4},
        new=[new_request("a", 2, [0, 11, 12, 13]), new_request("b", 0, [20])],
        new_block_ids_to_zero=[11, 12, 13, 20],
        kv_cache_block_copies=[KVCacheBlockCopy(7, 12), KVCacheBlockCopy(12, 20)],
    )
    shorter, _, _ = plan(output).shorten({"a": 10})
    assert shorter.new_block_ids_to_zero == [13, 20]
    assert shorter.kv_cache_block_copies == [KVCacheBlockCopy(12, 20)]


def test_every_group_has_its_own_block_size(new_request, scheduler_output):
    """Blocks to keep are found per KV-cache group."""
    output = scheduler_output(
        {"a": 9}, new=[new_request("a", 0, ([1, 2, 3], [30, 40]))], new_block_ids_to_zero=[1, 2, 3, 30, 40]
    )
    shorter, _, _ = plan(output, (4, 8)).shorten({"a": 8})
    assert shorter.new_block_ids_to_zero == [3, 40]


def test_what_a_hook_sees(new_request, scheduler_output):
    """A StepRequest has counts, block ids and the limit, in the scheduler's order."""
    output = scheduler_output({"b": 6, "a": 10}, new=[new_request("a", 4, [1, 2, 3, 4]), new_request("b", 0, [5, 6])])
    requests = plan(output).requests()
    assert list(requests) == ["b", "a"]
    a = requests["a"]
    assert (a.num_computed_tokens, a.num_scheduled_tokens, a.num_skippable_tokens) == (4, 10, 9)
    assert a.block_ids == ((1, 2, 3, 4),)
    assert a.is_new
    assert not a.is_resumed


def test_block_ids_are_valid_in_their_step_only(new_request, scheduler_output):
    """Read in time they stay as they were; read later they'd be another step's, which is an error."""
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])])
    tables = BlockTables()
    tables.update(output)
    step = StepPlan(output, tables, (4,))
    read, unread = step.requests()["a"], step.requests()["a"]
    assert read.block_ids == ((1, 2),)
    tables.update(scheduler_output({"a": 8}, cached=[("a", 8, [3, 4])]))
    assert read.block_ids == ((1, 2),)
    with pytest.raises(RuntimeError, match="'a' are read after their step"):
        _ = unread.block_ids


def test_several_plugins_are_merged_by_maximum():
    """The longest answer counts, whoever gave it; the answers stay as they are."""
    answers = [{}, {"a": 4, "b": 2}, {"a": 8, "b": 1, "c": 5}]
    assert merge_counts(answers) == {"a": 8, "b": 2, "c": 5}
    assert answers == [{}, {"a": 4, "b": 2}, {"a": 8, "b": 1, "c": 5}]
    assert merge_counts([]) == {}


@pytest.mark.parametrize(
    ("version", "parsed"),
    [("0.32.0+cpu", (0, 32)), ("0.19.1", (0, 19)), ("0.33.0rc1", (0, 33)), ("dev", None), ("0.1.dev1+g1", None)],
)
def test_versions_are_read(version, parsed):
    """Releases are told by major and minor; development builds don't tell."""
    assert compat.parse_version(version) == parsed


def test_an_old_vllm_is_refused_and_a_new_one_is_judged_by_content():
    """Too old is an error with the remedy; newer than tested is a note; what was tested is neither."""
    from kvplug.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match=r"0\.13\.1 is too old.*install vLLM 0\.14 or newer"):
        compat.check_vllm_version("0.13.1")
    assert compat.check_vllm_version("0.32.0") is None
    assert "newer than" in (compat.check_vllm_version("0.99.0") or "")
    assert "doesn't say" in (compat.check_vllm_version("dev") or "")
