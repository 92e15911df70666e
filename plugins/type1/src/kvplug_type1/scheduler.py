"""Scheduler half of type1: keys, and which blocks a step may load and has to save.

It promises nothing to vLLM's scheduler. What it sends are offers: the worker loads what is in its store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplug import compat
from kvplug.provenance import Provenance
from kvplug.request_keys import KeyMaker, RequestKeys
from kvplug.requests import BlockTables
from kvplug.saves import SavePlanner, SaveProgress
from kvplug.stats import Stats
from kvplug_type1.metadata import Announcement, LoadRequest, SaveRequest, Type1Metadata, Type1WorkerMetadata
from kvplug_type1.order import BlockOrder

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup

__all__ = ["Type1Scheduler"]


@dataclass
class _Tracked:
    """A request that the scheduler has looked at and that hasn't finished."""

    request: Any
    #: None if its KV must not be stored or reused.
    keys: RequestKeys | None
    progress: SaveProgress
    #: Tokens that vLLM's own prefix cache had when the request was last looked up.
    num_local_tokens: int
    #: Whether a hit would still be the request's first.
    missed: bool = True
    #: Whether it was preempted, so that what it looks up now counts no more.
    resumed: bool = False


class Type1Scheduler:
    """Keeps keys and block tables of the requests, and turns each step into metadata."""

    def __init__(self, *, namespace: bytes, groups: Sequence[KVGroup], steps_in_flight: int = 1) -> None:
        """Start without requests.

        Args:
            namespace: Fingerprint that every key starts from (32 bytes).
            groups: The model's KV-cache groups.
            steps_in_flight: Steps that may be scheduled before the first one's result is known.

        """
        self._keys = KeyMaker(namespace, groups)
        self._order = BlockOrder(groups)
        self._planner = SavePlanner(groups)
        self._provenance = Provenance(steps_in_flight)
        self._tracked: dict[str, _Tracked] = {}
        self._tables = BlockTables()
        self._reset_count = 0
        # Requests to tell the workers of, in the order of their arrival.
        self._unannounced: dict[str, None] = {}
        # Finished since the last step was scheduled: what came of their last one is known only after that.
        self._finished: dict[str, _Tracked] = {}
        self.stats = Stats()

    @property
    def num_tracked_requests(self) -> int:
        """Requests that are remembered. 0 when all have finished."""
        return len(self._tracked)

    def track(self, request: Any, num_local_tokens: int | None = None) -> None:
        """Remember a request that has arrived, that vLLM looks up, or has allocated blocks for.

        If it isn't scheduled in the next step, the workers are told of it then. May be called any number of times. An
        id that comes with another request object is a new request.

        Args:
            request: vLLM's `Request`.
            num_local_tokens: Tokens in vLLM's own prefix cache, if the call is the lookup.

        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            self._provenance.forget(request.request_id)
            tracked = _Tracked(request, self._keys.start(request), self._planner.start(), num_local_tokens or 0)
            self._tracked[request.request_id] = tracked
            self._unannounced[request.request_id] = None
        elif num_local_tokens is not None:
            tracked.num_local_tokens = num_local_tokens

    def finish(self, request: Any) -> None:
        """Forget a request that finished, was aborted, or was never scheduled."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.request is request:
            del self._tracked[request.request_id]
            self._unannounced.pop(request.request_id, None)
            self._provenance.forget(request.request_id)
            self._finished[request.request_id] = tracked

    def take_report(self, report: Type1WorkerMetadata) -> None:
        """Count what came of a step's loads.

        Args:
            report: What the workers agreed on.

        """
        for request_id, count in report.skipped.items():
            tracked = self._tracked.get(request_id) or self._finished.get(request_id)
            if tracked is None or tracked.resumed:
                continue  # aborted while the step ran, or looked up before
            self.stats.add("prefix_cache_hits", count)
            if tracked.missed:
                tracked.missed = False
                self.stats.add("requests_hit")

    def reset(self) -> bool:
        """Have every worker forget what it stored, before it loads anything more. Always succeeds.

        What requests compute that are running now is based on KV from before: it isn't stored until they start again.
        """
        self._reset_count += 1
        self._provenance.reset(self._tracked)
        return True

    def build_metadata(self, scheduler_output: Any) -> Type1Metadata:
        """Turn one step of the scheduler into work for the worker half.

        Args:
            scheduler_output: vLLM's `SchedulerOutput`, complete, before the scheduler advances its own counts.

        """
        self._tables.update(scheduler_output)
        self._finished.clear()
        starting = self._tables.new | self._tables.resumed
        self._start(scheduler_output, starting)
        loads: list[LoadRequest] = []
        saves: list[SaveRequest] = []
        for request_id, computed, scheduled in compat.scheduled_requests(scheduler_output):
            tracked = self._tracked.get(request_id)
            if tracked is None or request_id not in self._tables or not self._provenance.may_load(request_id):
                continue
            # A token that isn't known yet (asynchronous scheduling) or isn't accepted yet (speculative decoding)
            # isn't in the request's list, and nothing from its position on is usable.
            known = min(computed + scheduled, len(tracked.request.all_token_ids))
            end = known // self._order.alignment * self._order.alignment
            if known < tracked.progress.next_tokens and end <= computed:
                continue  # the common case: a decode step that fills no block
            if not self._has_keys(tracked):
                continue
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            last_token = computed + scheduled - drafts - 1
            if (load := self._load(tracked, computed, last_token, end)) is not None:
                loads.append(load)
                if request_id in self._tables.new:
                    self.stats.add("requests_looked_up")
                    self.stats.add("prefix_cache_queries", tracked.request.num_prompt_tokens - computed)
            if self._provenance.may_save(request_id):
                saves.extend(self._save(tracked, computed, known, starts=request_id in starting))
        return Type1Metadata(
            candidates=tuple(load.request_id for load in loads),
            loads=tuple(loads),
            saves=tuple(saves),
            announced=tuple(self._announce(scheduler_output)),
            reset_count=self._reset_count,
        )

    def _announce(self, scheduler_output: Any) -> Iterator[Announcement]:
        """Yield the waiting requests that the workers don't know of, those that were just preempted included."""
        waiting = [*self._unannounced, *self._tables.preempted]
        self._unannounced.clear()
        for request_id in waiting:
            tracked = self._tracked.get(request_id)
            if tracked is None or request_id in scheduler_output.num_scheduled_tokens:
                continue
            if not self._has_keys(tracked) or getattr(tracked.request, "skip_reading_prefix_cache", False):
                continue
            if keys := self._all_keys(tracked):
                self.stats.add("requests_announced")
                yield Announcement(request_id, keys)

    def _has_keys(self, tracked: _Tracked) -> bool:
        """Bring a request's keys up to date; False if it is neither stored nor reused."""
        if tracked.keys is not None and not self._keys.extend(tracked.keys, tracked.request):
            tracked.keys = None
        return tracked.keys is not None

    def _start(self, scheduler_output: Any, starting: set[str]) -> None:
        """Take in which requests start, and which of them another connector (under `MultiConnector`) loads."""
        started = []
        if starting:
            may_load = compat.may_have_scheduler_side_loads(scheduler_output)
            for request_id, computed, _ in compat.scheduled_requests(scheduler_output):
                tracked = self._tracked.get(request_id)
                if tracked is None or request_id not in starting:
                    continue
                tracked.resumed = request_id in self._tables.resumed
                tracked.progress = self._planner.start()  # also fills gaps that eviction left
                started.append((request_id, may_load and computed > tracked.num_local_tokens))
        self._provenance.start_step(started)

    def _all_keys(self, tracked: _Tracked) -> tuple[bytes, ...]:
        """Return the keys of all full blocks of a request so far, in the order in which they are looked for."""
        assert tracked.keys is not None
        alignment = self._order.alignment
        end = len(tracked.request.all_token_ids) // alignment * alignment
        return self._order.pick(tracked.keys.by_group, 0, end)

    def _load(self, tracked: _Tracked, computed: int, last_token: int, end: int) -> LoadRequest | None:
        if min(end, last_token) <= computed:
            return None
        request_id = tracked.request.request_id
        if request_id in self._tables.vetoes or getattr(tracked.request, "skip_reading_prefix_cache", False):
            return None
        assert tracked.keys is not None
        block_ids = self._order.pick(self._tables.block_ids(request_id), computed, end)
        if 0 in block_ids:
            return None  # the null block: vLLM doesn't keep these positions
        return LoadRequest(
            request_id=request_id,
            num_computed_tokens=computed,
            keys=self._order.pick(tracked.keys.by_group, computed, end),
            block_ids=block_ids,
            groups=self._order.groups(computed, end),
        )

    def _save(self, tracked: _Tracked, computed: int, known: int, *, starts: bool) -> Iterator[SaveRequest]:
        assert tracked.keys is not None
        request_id = tracked.request.request_id
        by_group, tables = tracked.keys.by_group, self._tables.block_ids(request_id)
        # Where a step ends matters to recurrent state only, which there is none of.
        planned = self._planner.plan(tracked.progress, computed, known, exact=False, starts=starts)
        for group, first, end in planned:
            pairs = [
                (key, block)
                for key, block in zip(by_group[group][first:end], tables[group][first:end], strict=True)
                if block != 0
            ]
            if pairs:
                keys, block_ids = zip(*pairs, strict=True)
                yield SaveRequest(request_id, keys, block_ids, group)
