"""The harness notices what could be wrong with a hook: tried on the installed vLLM's own runners."""

from __future__ import annotations

import re

import pytest
from matrixlib.harness import patched, run

from kvplug import compat, requests
from kvplug_hooks.patches.before_update_states import BY_RUNNER
from kvplug_hooks.plan import plan, rewrite

RUNNERS = pytest.mark.parametrize("runner", BY_RUNNER)
CALL = "scheduler_output = before_update_states(self, scheduler_output)\n"
#: What the state update begins with.
UPDATES = {
    "v1": "            deferred_state_corrections_fn = self._update_states(scheduler_output)\n",
    "v2": "            self.finish_requests(scheduler_output)\n",
}


@pytest.fixture(scope="module")
def texts(vllm_tree):
    """Each runner's patched file."""
    return {
        runner: next(iter(rewrite(vllm_tree, plan(vllm_tree, [patch])).values())) for runner, patch in BY_RUNNER.items()
    }


def found(tree, runner, text):
    patch = BY_RUNNER[runner]
    return run(tree, patch, runner, compile(text, patch.path, "exec", dont_inherit=True))


@RUNNERS
@pytest.mark.parametrize("way", ["import", "file"])
def test_nothing_is_wrong_with_the_installed_vllm(vllm_tree, texts, runner, way):
    """The hook runs in both runners, whether it came with the import or is in the file."""
    patch = BY_RUNNER[runner]
    assert run(vllm_tree, patch, runner, patched(vllm_tree, patch, texts[runner])[way]) is None


def indent_of_call(text):
    return re.search(rf"^( *){re.escape(CALL)}", text, re.MULTILINE)[1]


def dropped(text, runner):
    return text.replace(CALL, CALL.removeprefix("scheduler_output = "))


def twice(text, runner):
    return text.replace(CALL, f"{CALL}{indent_of_call(text)}{CALL}")


def too_late(text, runner):
    line = UPDATES[runner]
    return never(text, runner).replace(line, f"{line}            {CALL}", 1)


def in_place(text, runner):
    return text.replace(CALL, f"{CALL}{indent_of_call(text)}scheduler_output.num_scheduled_tokens.update(c=5)\n")


def never(text, runner):
    return re.sub(rf"^ *{re.escape(CALL)}", "", text, flags=re.MULTILINE)


@RUNNERS
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (dropped, r"the order of events is .*'zero \[1, 2, 3, 4, 30\]'.* instead of .*'zero \[3, 4, 30\]'"),
        (twice, r"the order of events is .*'before_update_states', 'before_update_states'"),
        (too_late, r"the order of events is .*'state update', .*before_update_states"),
        (in_place, r"the scheduler's own output is|the number of tokens by request is"),
        (never, r"the order of events is .* instead of .*before_update_states"),
    ],
)
def test_a_wrong_call_is_noticed(vllm_tree, texts, runner, change, problem):
    """A result that isn't used, a second call, one after the state update, a changed step, and none at all."""
    text = change(texts[runner].text, runner)
    assert text != texts[runner].text
    assert re.search(problem, found(vllm_tree, runner, text))


@RUNNERS
def test_blocks_that_are_overwritten_too_early_are_noticed(vllm_tree, texts, runner):
    """A runner that zeroes blocks before it asks the hook would wipe what is loaded, or what is still read."""
    zero = {"v1": "self._zero_block_ids", "v2": "self.kv_block_zeroer.zero_block_ids"}[runner]
    text = texts[runner].text
    text = text.replace(CALL, f"{zero}([1])\n{indent_of_call(text)}{CALL}")
    assert re.search(r"the order of events is .*'zero \[1\]', .*'before_update_states'", found(vllm_tree, runner, text))


def test_a_call_before_vllms_own_is_noticed(vllm_tree, texts):
    """On the first runner, a connector hears of preemptions from vLLM before it hears from the hook."""
    without = never(texts["v1"].text, "v1")
    marker = "            kv_connector_metadata = scheduler_output.kv_connector_metadata\n"
    assert without.count(marker) == 1
    text = without.replace(marker, f"            {CALL}{marker}")
    assert "'before_update_states', \"vLLM's own call\"" in found(vllm_tree, "v1", text)


def test_a_count_that_the_second_runner_keeps_for_itself_is_noticed(vllm_tree, texts, monkeypatch):
    """Without its own counts put right, it would compute a later chunk at the wrong place."""
    monkeypatch.setattr(compat, "set_device_computed_tokens", lambda runner, counts: None)
    assert "what the runner counts as computed of a is [64, 80]" in found(vllm_tree, "v2", texts["v2"].text)


@RUNNERS
def test_a_wrong_step_is_noticed(vllm_tree, texts, runner, monkeypatch):
    """A request that comes back is neither new nor someone else's."""
    monkeypatch.setattr(requests.compat, "preempted_ids", lambda output: ())
    assert re.search(
        r"when a request loses its blocks to a new one, the order of events is",
        found(vllm_tree, runner, texts[runner].text),
    )


@RUNNERS
def test_a_hook_that_fails_is_noticed(vllm_tree, texts, runner, monkeypatch):
    """The dispatcher goes on without a hook that raises; the harness doesn't."""
    monkeypatch.setattr("matrixlib.live._seen", lambda step: 1 / 0)
    assert "the number of failed hooks is 1" in found(vllm_tree, runner, texts[runner].text)


@RUNNERS
def test_a_runner_that_needs_something_else_is_named(vllm_tree, texts, runner):
    """What a later release brings, and no stand-in has, ends in a sentence that says where."""
    text = texts[runner].text.replace(CALL, f"{CALL.rstrip()}.newer\n")
    assert re.search(r"raises AttributeError.* in line \d+ of vllm/v1/worker/gpu", found(vllm_tree, runner, text))
