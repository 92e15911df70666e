"""Runs a release's own, patched `execute_model` through the scenario, each step to the end of the state update.

The runner, its request states, the scheduler's output and the classes of connectors are the release's own, and the
dispatcher is kvplug's. What else they import are stand-ins.
"""

from __future__ import annotations

import copy
from traceback import extract_tb
from types import CodeType
from typing import Any

from packaging.version import Version

from kvplug_hooks.errors import PatchError
from kvplug_hooks.installed import Tree
from kvplug_hooks.memory import prepare
from kvplug_hooks.patch import Patch
from kvplug_hooks.source import SourceText
from matrixlib import live, runners
from matrixlib.outputs import output_of
from matrixlib.scenario import STEPS, New, Resumed, Step
from matrixlib.standins import World

__all__ = ["patched", "run"]

_OUTPUT = "vllm.v1.core.sched.output"

#: From which release on the first runner calls its connector in every step, and each runner overwrites blocks.
_EVERY_STEP = Version("0.19.0")
_ZEROES = {"v1": Version("0.17.1"), "v2": Version("0.23.0")}
_COPIES = Version("0.26.0")


class _WrongError(Exception):
    """A patched runner doesn't do what it should."""


def patched(tree: Tree, patch: Patch, text: SourceText) -> dict[str, CodeType]:
    """Return a runner's patched module, compiled, by the way in which it is patched.

    Args:
        tree: The release.
        patch: The patch.
        text: The module's file, patched.

    Raises:
        PatchError: It can't be patched as it is imported.

    """
    prepared = prepare(tree.source(patch), patch.path, [patch], filename=patch.path, version=tree.version)
    if prepared.edit is None:
        raise PatchError(prepared.sites[0].reason)
    return {"import": prepared.edit.code, "file": compile(text.data, patch.path, "exec", dont_inherit=True)}


def run(tree: Tree, patch: Patch, kind: str, code: CodeType) -> str | None:
    """Take a patched runner through all steps.

    Args:
        tree: The release.
        patch: The patch that the runner has.
        kind: The runner, `v1` or `v2`.
        code: The runner's module, patched.

    Returns:
        What is wrong and in which step, or None: a hook was called at the wrong time or saw something else than in
        other releases, the runner took in something else than it should, or the scheduler's own object was changed.

    """
    world = World(tree, (*live.OWN, *runners.OWN, _OUTPUT), runners.GIVEN)
    log: list[str] = []
    done = "the module is executed"
    try:
        with live.live(world, log) as calls:
            runner = runners.runner_of(kind, world.execute(code, patch.module), world, log)
            for step in STEPS:
                done = step.name
                _take(runner, world, calls, step)
    except _WrongError as error:
        return f"when {done}, {error}"
    except Exception as error:  # noqa: BLE001 - the release's own code may raise anything
        last = extract_tb(error.__traceback__)[-1]
        return f"when {done}, {last.name} raises {error!r} in line {last.lineno} of {last.filename}"
    return None


def _take(runner: runners.Runner, world: World, calls: live.Live, step: Step) -> None:
    release, kind = world.release, runner.kind
    calls.log.clear()
    calls.saw.clear()
    calls.loaded = dict(step.loaded)
    sent = output_of(world.module(_OUTPUT), step, release=release, runner=kind, metadata=calls.metadata())
    original = copy.deepcopy(sent)
    try:
        runner.execute_model(sent)
    except runners.StateUpdated:
        pass
    else:
        raise _WrongError("execute_model ends without a state update")
    _same("the number of failed hooks", calls.errors(), 0)
    _same("the scheduler's own output", sent, original)
    _same("the order of events", calls.log, _events(step, kind, release, told=bool(sent.preempted_req_ids)))
    _same("what hooks see", calls.saw, [_expected(step)] * len(calls.saw))
    _same("whether the runner has the scheduler's own output", runner.output is sent, not step.skipped)
    left = {name: request.scheduled - step.skipped.get(name, 0) for name, request in step.requests.items()}
    _same("the number of tokens", runner.output.total_num_scheduled_tokens, sum(left.values()))
    _same("the number of tokens by request", runner.output.num_scheduled_tokens, left)
    for name, request in step.requests.items():
        computed = request.computed + step.skipped.get(name, 0)
        _same(f"what the runner counts as computed of {name}", sorted(runner.counts(name)), [computed])
        _same(f"the runner's block table of {name}", runner.blocks(name), [*map(list, step.seen[name].block_ids)])
    runner.computed(left)


def _events(step: Step, kind: str, release: Version, *, told: bool) -> list[str]:
    """Return what has to happen, in this order."""
    events = []
    if kind == "v1" and (told or release >= _EVERY_STEP):
        events.append("vLLM's own call")
    if step.preempted:
        events.append("before_blocks_reused")
    events += ["before_update_states", "state update"]
    if step.zeroed and release >= _ZEROES[kind]:
        events.append(f"zero {list(step.still_zeroed)}")
    if step.overwritten and release >= _COPIES:
        events.append(f"copy over {list(step.still_overwritten)}")
    return events


def _expected(step: Step) -> dict[str, Any]:
    """Return what hooks must see, the same in all releases and on both runners."""
    resumed = {name for name, request in step.requests.items() if isinstance(request, Resumed)}
    new = {name for name, request in step.requests.items() if isinstance(request, New)} - resumed
    return {
        "requests": {
            name: (
                request.computed,
                request.scheduled,
                step.drafts.get(name, 0),
                name in new,
                name in resumed,
                step.seen[name].skippable,
                step.seen[name].block_ids,
            )
            for name, request in step.requests.items()
        },
        "new": new,
        "resumed": resumed,
        "preempted": set(step.preempted),
        "finished": set(step.finished),
        "num_scheduled_tokens": sum(request.scheduled for request in step.requests.values()),
        "metadata": "ours",
    }


def _same(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise _WrongError(f"{what} is {found!r} instead of {expected!r}")
