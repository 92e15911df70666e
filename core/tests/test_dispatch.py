"""The patched line's other end, with fake runners and connectors: what is called when, and what comes back."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

import kvplug
from kvplug import dispatch
from kvplug.errors import UnsupportedError


class Recorder:
    """A connector that answers what it is told to, and remembers its steps."""

    def __init__(self, answer=None):
        self.answer = answer
        self.steps = []
        self.preemptions = []

    @kvplug.hookimpl
    def before_update_states(self, step):
        self.steps.append(step)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @kvplug.hookimpl
    def before_blocks_reused(self, step):
        self.preemptions.append(step.preempted)


class MultiConnector:
    """Stands in for vLLM's class of this name: children, and metadata per child."""

    def __init__(self, *children):
        self._connectors = list(children)


class Plain:
    """A connector without hooks."""

    @property
    def explosive(self):
        raise AssertionError("nobody may look at a connector's properties")


class Runner(SimpleNamespace):
    """Stands in for a model runner."""


_runners = {}


def runner(**parallel):
    """Return the model runner of a test: one object for as long as its engine lives."""
    key = tuple(parallel.items())
    if key not in _runners:
        _runners[key] = make_runner(**parallel)
    return _runners[key]


def make_runner(**parallel):
    sizes = {
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        **parallel,
    }
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))
    return Runner(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**sizes)),
    )


@pytest.fixture
def live(monkeypatch):
    """Make a connector the live one of this process, with one tensor-parallel rank."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    _runners.clear()
    monkeypatch.setattr(dispatch, "_current", None)
    monkeypatch.setattr(dispatch.compat, "tensor_parallel_ranks", lambda: (0,))

    def make_live(connector):
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        return connector

    make_live(None)
    return make_live


def test_no_connector_gets_the_argument_back(live, scheduler_output):
    """Without a connector the patched line is a lookup."""
    output = scheduler_output({"a": 1})
    assert dispatch.before_update_states(None, output) is output
    assert dispatch.current_dispatcher() is None


def test_a_connector_without_hooks_gets_the_argument_back(live, new_request, scheduler_output):
    """A connector that has no hooks costs no bookkeeping, and isn't looked at closely."""
    live(Plain())
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])])
    assert dispatch.before_update_states(runner(), output) is output
    assert len(dispatch.current_dispatcher()._tables) == 0


def test_a_step_is_shortened(live, new_request, scheduler_output):
    """What a hook says it loaded is taken off the step."""
    connector = live(Recorder({"a": 4}))
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])], finished=["z"])
    shorter = dispatch.before_update_states(runner(), output)
    assert shorter.num_scheduled_tokens == {"a": 4}
    (step,) = connector.steps
    assert step.new == {"a"}
    assert step.finished == {"z"}
    assert step.num_scheduled_tokens == 8
    assert dispatch.current_dispatcher().stats.get("tokens_skipped") == 4
    with pytest.raises(TypeError):
        step.requests["b"] = None


def test_what_is_not_read_is_not_computed(live, new_request, scheduler_output, monkeypatch):
    """A hook that doesn't read the requests doesn't pay for them."""
    live(Recorder(None))
    monkeypatch.setattr(dispatch.StepPlan, "requests", lambda self: pytest.fail("computed without need"))
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])])
    assert dispatch.before_update_states(runner(), output) is output


class Sly(dict):
    """A mapping that raises when it is read."""

    def items(self):
        raise KeyError("no")


MALFORMED = [RuntimeError("store is down"), ["a"], {"a": "many"}, {"a": None}, {"a": float("inf")}, Sly(a=1)]


@pytest.mark.parametrize("answer", MALFORMED, ids=repr)
def test_g10_a_plugin_that_fails_is_named_and_the_others_run(live, new_request, scheduler_output, caplog, answer):
    """An exception or a malformed answer is a miss, logged with plugin and hook; other plugins still count."""
    caplog.set_level(logging.WARNING)
    good = Recorder({"a": 4})
    live(MultiConnector(Recorder(answer), good))
    metadata = SimpleNamespace(metadata=(SimpleNamespace(), SimpleNamespace()))
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])], metadata=metadata)
    shorter = dispatch.before_update_states(runner(), output)
    assert shorter.num_scheduled_tokens == {"a": 4}
    assert dispatch.current_dispatcher().stats.get("plugin_errors") == 1
    assert "Recorder" in caplog.text
    assert "before_update_states" in caplog.text


def test_f4_the_children_of_a_multi_connector_get_their_own_metadata(live, new_request, scheduler_output):
    """MultiConnector forwards no unknown method: kvplug reaches its children, nested ones too."""
    first, second = Recorder({"a": 2}), Recorder({"a": 4})
    live(MultiConnector(Plain(), MultiConnector(first), second))
    mine, yours = SimpleNamespace(name="first"), SimpleNamespace(name="second")
    metadata = SimpleNamespace(metadata=(None, SimpleNamespace(metadata=(mine,)), yours))
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])], metadata=metadata)
    shorter = dispatch.before_update_states(runner(), output)
    assert shorter.num_scheduled_tokens == {"a": 4}
    assert first.steps[0].metadata is mine
    assert second.steps[0].metadata is yours


def test_blocks_reused_comes_once_and_only_after_a_preemption(live, new_request, scheduler_output):
    """The preemption hook is called in the step that preempts, before loads, and in no other."""
    connector = live(Recorder())
    call = runner()
    dispatch.before_update_states(call, scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])]))
    dispatch.before_update_states(call, scheduler_output({}, preempted=["a"]))
    dispatch.before_update_states(call, scheduler_output({}, preempted=[]))
    assert connector.preemptions == [{"a"}]
    assert len(connector.steps) == 3


def test_blocks_reused_comes_in_each_step_beside_another_that_loads(live, new_request, scheduler_output):
    """What another connector loads in the hook may go to blocks that this one still reads: it is told before."""
    order = []

    class Reads:
        @kvplug.hookimpl(optionalhook=True)
        def before_blocks_reused(self, step):
            order.append("reads")

    class Loads(Recorder):
        def before_blocks_reused(self, step):
            order.append("its own")

        @kvplug.hookimpl
        def before_update_states(self, step):
            order.append("loads")

    live(MultiConnector(Loads(), Reads()))
    call = runner()
    dispatch.before_update_states(
        call, scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])], metadata=SimpleNamespace(metadata=(1, 2)))
    )
    assert order == ["reads", "loads"]


def test_a_failing_preemption_hook_does_not_stop_the_step(live, new_request, scheduler_output):
    """The step goes on when a preemption hook raises."""

    class Failing(Recorder):
        @kvplug.hookimpl
        def before_blocks_reused(self, step):
            raise OSError("no")

    live(Failing({"a": 4}))
    call = runner()
    dispatch.before_update_states(call, scheduler_output({"b": 8}, new=[new_request("b", 0, [3, 4])]))
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])], preempted=["b"])
    assert dispatch.before_update_states(call, output).num_scheduled_tokens == {"a": 4}
    assert dispatch.current_dispatcher().stats.get("plugin_errors") == 1


def test_a_misspelt_hook_is_an_error(live, scheduler_output):
    """A marked method that is no hook is refused with the plugin's name and the hooks there are."""

    class Misspelt:
        @kvplug.hookimpl
        def before_update_state(self, step):
            return None

    live(Misspelt())
    with pytest.raises(UnsupportedError, match=r"Misspelt .*before_update_state.*before_blocks_reused"):
        dispatch.before_update_states(runner(), scheduler_output({}))


def test_an_argument_that_the_hook_does_not_have_is_an_error(live, scheduler_output):
    """A hook that wants more than it is given says so at the first step."""

    class Greedy:
        @kvplug.hookimpl
        def before_update_states(self, step, runner):
            return None

    live(Greedy())
    with pytest.raises(UnsupportedError, match=r"Greedy .*runner"):
        dispatch.before_update_states(runner(), scheduler_output({}))


def test_g10_an_old_implementation_survives_a_grown_signature(live, new_request, scheduler_output):
    """An implementation names only the arguments that it wants."""

    class Minimal:
        @kvplug.hookimpl
        def before_update_states(self):
            return {"a": 4}

    live(Minimal())
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])])
    assert dispatch.before_update_states(runner(), output).num_scheduled_tokens == {"a": 4}


def test_properties_are_not_touched(live, new_request, scheduler_output):
    """Registration looks at the class: a connector's properties may do anything."""

    class Careful(Plain):
        @kvplug.hookimpl
        def before_update_states(self, step):
            return {"a": 4}

    live(Careful())
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])])
    assert dispatch.before_update_states(runner(), output).num_scheduled_tokens == {"a": 4}


@pytest.mark.parametrize(
    "parallel",
    [{"pipeline_parallel_size": 2}, {"prefill_context_parallel_size": 2}, {"decode_context_parallel_size": 2}],
)
def test_pipeline_and_context_parallelism_are_refused(live, scheduler_output, parallel):
    """Ranks that can't agree on a step's length aren't let into one."""
    live(Recorder())
    with pytest.raises(UnsupportedError, match=r"parallelism \(2\).*type2"):
        dispatch.before_update_states(runner(**parallel), scheduler_output({}))


class Ranks:
    """Stands in for the agreement with another rank, and remembers when ranks talked."""

    def __init__(self, other):
        self.other = other
        self.calls = []

    def minimum(self, counts):
        self.calls.append(list(counts))
        return [min(a, b) for a, b in zip(counts, self.other, strict=True)]


def agreeing(monkeypatch, *other):
    ranks = Ranks(other)
    monkeypatch.setattr(dispatch.compat, "tensor_parallel_ranks", lambda: (0, 1))
    monkeypatch.setattr(dispatch, "Agreement", lambda _: ranks)
    return ranks


def test_b3_the_smallest_hit_over_ranks_counts(live, new_request, scheduler_output, monkeypatch):
    """A rank that has less is what all ranks go by."""
    ranks = agreeing(monkeypatch, 2, 8)
    live(Recorder({"a": 8, "b": 4}))
    output = scheduler_output({"a": 16, "b": 16}, new=[new_request("a", 0, [1, 2, 3, 4]), new_request("b", 0, [5] * 4)])
    shorter = dispatch.before_update_states(runner(), output)
    assert shorter.num_scheduled_tokens == {"a": 14, "b": 12}
    assert ranks.calls == [[8, 4]]


def test_b3_a_rank_that_fails_still_talks(live, new_request, scheduler_output, monkeypatch):
    """A rank whose plugin raises takes part with 0: the others must not wait for it."""
    ranks = agreeing(monkeypatch, 8)
    live(Recorder(RuntimeError("lost")))
    output = scheduler_output({"a": 16}, new=[new_request("a", 0, [1, 2, 3, 4])])
    assert dispatch.before_update_states(runner(), output) is output
    assert ranks.calls == [[0]]


def test_candidates_decide_whether_ranks_talk(live, new_request, scheduler_output, monkeypatch):
    """With candidates in the metadata ranks talk about those only, and not at all when there are none."""
    ranks = agreeing(monkeypatch, 8)
    live(Recorder({"a": 8, "b": 4}))
    new = [new_request("a", 0, [1, 2, 3, 4]), new_request("b", 0, [5] * 4)]
    output = scheduler_output({"a": 16, "b": 16}, new=new, metadata=SimpleNamespace(candidates=()))
    assert dispatch.before_update_states(runner(), output) is output
    assert ranks.calls == []
    output = scheduler_output({"a": 16, "b": 16}, new=new, metadata=SimpleNamespace(candidates=("b",)))
    assert dispatch.before_update_states(runner(), output).num_scheduled_tokens == {"a": 16, "b": 12}
    assert ranks.calls == [[4]]


@pytest.mark.parametrize("candidates", [5, [["unhashable"]], RuntimeError("lost")], ids=repr)
def test_b3_malformed_candidates_are_a_miss_on_which_ranks_still_talk(
    live, new_request, scheduler_output, monkeypatch, candidates
):
    """Whatever a connector's metadata holds, this rank takes part, and other plugins count."""

    class Metadata:
        @property
        def candidates(self):
            if isinstance(candidates, Exception):
                raise candidates
            return candidates

    ranks = agreeing(monkeypatch, 8)
    live(Recorder({"a": 8}))
    output = scheduler_output({"a": 16}, new=[new_request("a", 0, [1, 2, 3, 4])], metadata=Metadata())
    assert dispatch.before_update_states(runner(), output) is output
    assert ranks.calls == [[0]]
    assert dispatch.current_dispatcher().stats.get("plugin_errors") == 1


def test_each_plugin_answers_for_its_own_candidates(live, new_request, scheduler_output, monkeypatch):
    """A count for a request that isn't scheduled, isn't the plugin's candidate, or isn't positive is no count."""
    ranks = agreeing(monkeypatch, 16, 16, 16)
    live(MultiConnector(Recorder({"gone": 9, "a": 4, "b": 2, "c": -(10**30)}), Recorder({"a": 8, "b": 6, "c": 0})))
    metadata = SimpleNamespace(
        metadata=(
            SimpleNamespace(candidates=("gone", "c", "b", "a")),
            SimpleNamespace(candidates=("a", "late")),
        )
    )
    new = [new_request(name, 0, [n] * 4) for n, name in enumerate("abc", 1)]
    output = scheduler_output({"a": 16, "b": 16, "c": 16}, new=new, metadata=metadata)
    shorter = dispatch.before_update_states(runner(), output)
    assert ranks.calls == [[0, 2, 8]]  # in the order in which they were named
    assert shorter.num_scheduled_tokens == {"a": 8, "b": 14, "c": 16}


def test_counts_fit_into_what_ranks_exchange(live, new_request, scheduler_output, monkeypatch):
    """An absurd count is no more than everything that is scheduled."""
    ranks = agreeing(monkeypatch, 16)
    live(Recorder({"a": 10**30}))
    output = scheduler_output({"a": 16}, new=[new_request("a", 0, [1, 2, 3, 4])])
    assert dispatch.before_update_states(runner(), output).num_scheduled_tokens == {"a": 1}
    assert ranks.calls == [[16]]


def test_two_engines_with_one_connector_are_refused(live, scheduler_output):
    """In one process vLLM gives two engines one connector: loads for one would go into the other's cache."""
    live(Recorder())
    first, second = make_runner(), make_runner()
    dispatch.before_update_states(first, scheduler_output({}))
    with pytest.raises(UnsupportedError, match=r"two engines in one process.*VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        dispatch.before_update_states(second, scheduler_output({}))


def test_without_candidates_ranks_talk_at_every_step(live, scheduler_output, new_request, monkeypatch):
    """A connector that doesn't say who may be shortened is asked about everyone."""
    ranks = agreeing(monkeypatch, 0)
    live(Recorder(None))
    dispatch.before_update_states(runner(), scheduler_output({"a": 16}, new=[new_request("a", 0, [1, 2, 3, 4])]))
    assert ranks.calls == [[0]]


def test_a_new_engine_in_the_process_gets_a_new_dispatcher(live, new_request, scheduler_output):
    """Nothing of one connector's requests is left for the next one."""
    first, second = Recorder({"a": 4}), Recorder({"a": 6})
    output = scheduler_output({"a": 8}, new=[new_request("a", 0, [1, 2])])
    live(first)
    assert dispatch.before_update_states(runner(), output).num_scheduled_tokens == {"a": 4}
    live(second)
    assert dispatch.before_update_states(runner(), output).num_scheduled_tokens == {"a": 2}


def test_hooks_are_found_on_the_class():
    """`has_hooks` names marked methods, inherited and renamed ones included, and looks at no instance."""
    from kvplug.hookspecs import has_hooks

    class Renamed(Recorder):
        @kvplug.hookimpl(specname="before_update_states")
        def something(self, step):
            return None

    assert has_hooks(Recorder) == {"before_update_states", "before_blocks_reused"}
    assert has_hooks(Renamed) == {"before_update_states", "before_blocks_reused"}
    assert has_hooks(Plain) == frozenset()
