"""The other end of the patched line in vLLM's model runners.

The line is `scheduler_output = before_update_states(self, scheduler_output)`, once per step and worker, before the
runner changes any state. With no connector, or none that implements a hook, it gets its argument back.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from time import perf_counter
from typing import Any

from kvplug import compat
from kvplug.agreement import Agreement
from kvplug.hookspecs import has_hooks
from kvplug.log import get_logger
from kvplug.manager import HookedConnector
from kvplug.requests import BlockTables
from kvplug.stats import Stats
from kvplug.step import Step
from kvplug.steps import StepPlan, merge_counts

__all__ = ["Dispatcher", "before_update_states", "current_dispatcher"]

logger = get_logger(__name__)

_current: Dispatcher | None = None


def before_update_states(runner: Any, scheduler_output: Any) -> Any:
    """Call the live connector's hooks, and return the scheduler's output for the runner to go on with.

    Args:
        runner: The model runner that is about to take in the step.
        scheduler_output: vLLM's `SchedulerOutput`. Not changed.

    Returns:
        The same object if nothing can be skipped, else a copy in which requests start later.

    Raises:
        UnsupportedError: At the first step, if the connector has hooks that can't work here; later, if another
            engine in this process calls with the same connector.

    """
    global _current  # noqa: PLW0603 - one worker, one connector; a new engine in this process brings another
    connector = compat.live_connector()
    if connector is None:
        return scheduler_output
    dispatcher = _current
    if dispatcher is None or dispatcher.connector is not connector:
        dispatcher = _current = Dispatcher(connector, runner)
    return dispatcher(runner, scheduler_output)


def current_dispatcher() -> Dispatcher | None:
    """Return the dispatcher of this worker's connector, or None before its first step."""
    return _current


class Dispatcher:
    """Hooks of one worker's connector, with what is kept from step to step."""

    def __init__(self, connector: Any, runner: Any) -> None:
        """Register every member of the connector that implements a hook.

        Args:
            connector: The worker's connector.
            runner: The model runner.

        Raises:
            UnsupportedError: A member marks an unknown hook, or implements `before_update_states` under pipeline or
                context parallelism.

        """
        self.connector = connector
        self.runner_class = type(runner)
        self._runner = weakref.ref(runner)
        self.stats = Stats()
        self.plugins = [
            HookedConnector(member, path, self.stats)
            for member, path in compat.connector_members(connector)
            if has_hooks(type(member))
        ]
        self._loaders = [p for p in self.plugins if "before_update_states" in p.hooks]
        # What one of them loads may go to blocks that another one still reads, preempted or not.
        self._beside_loaders = [p for p in self.plugins if any(loader is not p for loader in self._loaders)]
        self._tables = BlockTables()
        self._agreement: Agreement | None = None
        self._block_sizes: tuple[int, ...] = ()
        #: Tokens of the last step that didn't have to be computed, by request id; the same on all ranks.
        self.skipped: Mapping[str, int] = {}
        if not self.plugins:
            return
        groups = runner.kv_cache_config.kv_cache_groups
        self._block_sizes = tuple(group.kv_cache_spec.block_size for group in groups)
        if self._loaders:
            # A connector that vLLM loaded by module path comes here without having been asked at start.
            compat.refuse_split_dimensions(runner.vllm_config, self._loaders[0].name)
            if len(ranks := compat.tensor_parallel_ranks()) > 1:
                self._agreement = Agreement(ranks)
        # The demo and the documentation quote this line.
        logger.info(
            "kvplug: hooks of %s are live in %s, delivered by %s",
            ", ".join(p.name for p in self.plugins),
            type(runner),
            compat.hook_delivery(type(runner)),
        )

    def __call__(self, runner: Any, scheduler_output: Any) -> Any:
        """Run one step's hooks; see `before_update_states`."""
        if not self.plugins:
            return scheduler_output
        if self._runner() is not runner:
            raise compat.two_engines(self.plugins[0].name)
        start = perf_counter()
        self.skipped = {}
        self._tables.update(scheduler_output)
        plan = StepPlan(scheduler_output, self._tables, self._block_sizes)
        steps = self._steps(plan)
        if self._tables.preempted or self._beside_loaders:
            for plugin, step in zip(self.plugins, steps, strict=True):
                if self._tables.preempted or plugin in self._beside_loaders:
                    plugin.call("before_blocks_reused", step=step)
        if not self._loaders:
            return scheduler_output
        loaded = self._load(scheduler_output.num_scheduled_tokens, steps)
        if loaded is None:
            return scheduler_output
        output = self._shorten(runner, plan, loaded) if loaded else scheduler_output
        self.stats.observe("hook_seconds", perf_counter() - start)
        return output

    def _shorten(self, runner: Any, plan: StepPlan, loaded: dict[str, int]) -> Any:
        output, self.skipped, vetoed = plan.shorten(loaded)
        for reason in vetoed.values():
            self.stats.add(f"vetoes:{reason}")
        if self.skipped:
            self.stats.add("tokens_skipped", sum(self.skipped.values()))
            compat.set_device_computed_tokens(runner, plan.running_counts(self.skipped))
        return output

    def _load(self, scheduled: Mapping[str, int], steps: list[Step]) -> dict[str, int] | None:
        """Ask every plugin what it loaded, merge the answers, and agree on them with the other ranks.

        Returns:
            Tokens by request id, or None if there was no request that anything could have been loaded for.

        """
        answers = []
        everyone = False
        agreed_on: dict[str, int] = {}
        for plugin, step in zip(self.plugins, steps, strict=True):
            if "before_update_states" not in plugin.hooks:
                continue
            try:
                candidates = _candidates(step.metadata, scheduled)
            except Exception as error:  # noqa: BLE001 - it is the plugin's object, and the other ranks wait
                plugin.failed("before_update_states", error)
                everyone = True
                continue
            if candidates is None:
                everyone = True
            else:
                agreed_on.update(candidates)
            answers.append(self._ask(plugin, step, scheduled if candidates is None else candidates))
        loaded = merge_counts(answers)
        concerned = scheduled if everyone else agreed_on
        return self._agree(loaded, concerned) if concerned else None

    def _steps(self, plan: StepPlan) -> list[Step]:
        output = plan.scheduler_output
        preempted = frozenset(self._tables.preempted)
        finished = frozenset(output.finished_req_ids)
        requests = _Once(plan.requests)
        return [
            Step(
                requests,
                metadata=compat.metadata_of(output, plugin.path),
                preempted=preempted,
                finished=finished,
                num_scheduled_tokens=output.total_num_scheduled_tokens,
            )
            for plugin in self.plugins
        ]

    def _ask(self, plugin: HookedConnector, step: Step, allowed: Collection[str]) -> dict[str, int]:
        """Return what a plugin loaded, as whole numbers of at least 1, of the requests that it may answer for."""
        answer = plugin.call("before_update_states", step=step)
        if answer is None:
            return {}
        try:
            return {
                request_id: number
                for request_id, count in answer.items()
                if request_id in allowed and (number := int(count)) > 0
            }
        except Exception as error:  # noqa: BLE001 - the answer is the plugin's object, and may do anything
            plugin.failed("before_update_states", error)
            return {}

    def _agree(self, loaded: dict[str, int], scheduled: Mapping[str, int]) -> dict[str, int]:
        """Take the minimum over ranks. Whether ranks talk depends only on what is equal on all of them.

        Args:
            loaded: This rank's counts of loaded tokens, by request id.
            scheduled: The requests to agree on, the same on all ranks, with their counts of scheduled tokens.

        """
        if self._agreement is None:
            return loaded
        # No more than is scheduled: any number, however large, has to fit into what ranks exchange.
        ours = [min(loaded.get(request_id, 0), count) for request_id, count in scheduled.items()]
        counts = self._agreement.minimum(ours)
        return {request_id: count for request_id, count in zip(scheduled, counts, strict=True) if count > 0}


def _candidates(metadata: Any, scheduled: Mapping[str, int]) -> dict[str, int] | None:
    """Return the requests that a connector's scheduler half names, in order; None if it doesn't say.

    Requests that aren't scheduled are left out; of the others there is the number of scheduled tokens.
    """
    candidates = getattr(metadata, "candidates", None)
    if candidates is None:
        return None
    return {request_id: scheduled[request_id] for request_id in candidates if request_id in scheduled}


class _Once:
    """Call a function at most once and share its result, among the steps of several plugins."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._result: Any = None

    def __call__(self) -> Any:
        if self._result is None:
            self._result = self._function()
        return self._result
