"""Block tables follow the scheduler's outputs."""

from __future__ import annotations

from kvplug.requests import BlockTables


def test_new_blocks_are_appended_to_a_running_request(new_request, scheduler_output):
    """A request's table grows by the blocks of its later steps."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [5, 6])]))
    tables.update(scheduler_output({"a": 8}, cached=[("a", 8, [9])]))
    tables.update(scheduler_output({"a": 1}, cached=[("a", 16, None)]))
    assert tables.block_ids("a") == ([5, 6, 9],)
    assert not tables.new
    assert not tables.resumed


def test_the_schedulers_lists_are_not_shared(new_request, scheduler_output):
    """In-process executors hand over the scheduler's own lists: the mirror must not grow them."""
    first = new_request("a", 0, [5])
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8}, new=[first]))
    tables.update(scheduler_output({"a": 8}, cached=[("a", 8, [9])]))
    assert first.block_ids == ([5],)


def test_c6_preempted_and_resumed_again_and_again(new_request, scheduler_output):
    """After each resume the table is the new one, whatever came before."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])]))
    for blocks in ([3, 4], [5]):
        tables.update(scheduler_output({}, preempted=["a"]))
        assert tables.preempted == {"a"}
        assert "a" not in tables
        tables.update(scheduler_output({"a": 8}, cached=[("a", 0, blocks)], resumed=["a"]))
        assert tables.resumed == {"a"}
        assert tables.block_ids("a") == (blocks,)
        tables.update(scheduler_output({"a": 8}, cached=[("a", 8, [9])]))
        assert tables.block_ids("a") == ([*blocks, 9],)
        assert not tables.resumed


def test_a_resumed_request_of_the_second_runner_comes_as_new(new_request, scheduler_output):
    """The second runner gets resumed requests among the new ones: a hook sees them as resumed all the same."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])]))
    tables.update(scheduler_output({"a": 8}, preempted=["a"], new=[new_request("a", 0, [7])]))
    assert tables.resumed == {"a"}
    assert not tables.new
    assert tables.block_ids("a") == ([7],)


def test_a_preemption_that_nobody_announced(new_request, scheduler_output):
    """Before 0.25.1 reset_prefix_cache preempts without a word: a replaced table says so."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])]))
    tables.update(scheduler_output({"a": 8}, cached=[("a", 0, [7])], resumed=["a"]))
    assert tables.preempted == {"a"}


def test_a_preemption_that_nobody_announced_on_the_second_runner(new_request, scheduler_output):
    """There the request comes as new, with other blocks than it had: hooks see the same as on the first runner."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])]))
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [7, 2])]))
    assert (tables.preempted, tables.resumed, tables.new) == ({"a"}, {"a"}, set())
    assert tables.block_ids("a") == ([7, 2],)
    tables.update(scheduler_output({"a": 8}, cached=[("a", 8, [9])]))
    assert (tables.preempted, tables.resumed) == (set(), set())


def test_a_session_that_goes_on_was_not_preempted(new_request, scheduler_output):
    """Streaming input: the request comes as new again, with its blocks, of which a window may have passed some."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])]))
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 8, [0, 2, 3])]))
    assert (tables.preempted, tables.resumed, tables.new) == (set(), set(), {"a"})
    assert tables.block_ids("a") == ([0, 2, 3],)


def test_complete_tables_replace_what_is_known(new_request, scheduler_output):
    """In 0.30 and 0.31 a connector of vLLM's may move blocks of running requests; others than those it names stay."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8, "b": 8}, new=[new_request("a", 0, [1, 2]), new_request("b", 0, [3])]))
    output = scheduler_output({"a": 8, "b": 8}, cached=[("a", 8, [9]), ("b", 8, [4])])
    output.block_table_updates = {"a": ([7, 8, 9],), "gone": ([1],)}
    tables.update(output)
    assert (tables.block_ids("a"), tables.block_ids("b")) == (([7, 8, 9],), ([3, 4],))
    assert "gone" not in tables


def test_an_id_that_is_aborted_and_used_again(new_request, scheduler_output):
    """The same output may name an id as finished and as new: they are two requests."""
    tables = BlockTables()
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])]))
    tables.update(scheduler_output({"a": 8}, new=[new_request("a", 0, [3])], finished=["a"]))
    assert tables.block_ids("a") == ([3],)
    assert tables.new == {"a"}


def test_finished_requests_leave_nothing(new_request, scheduler_output):
    """State per request ends with the request, preempted ones included."""
    from types import SimpleNamespace

    tables = BlockTables()
    vetoed = new_request("b", 0, [3], sampling=SimpleNamespace(prompt_logprobs=1))
    tables.update(scheduler_output({"a": 8, "b": 8}, new=[new_request("a", 0, [1, 2]), vetoed]))
    assert tables.vetoes["b"] == "prompt_logprobs"
    tables.update(scheduler_output({}, preempted=["a"]))
    tables.update(scheduler_output({}, finished=["a", "b"]))
    assert len(tables) == 0
    assert not tables._preempted
    assert not tables.vetoes
