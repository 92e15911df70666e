"""Scheduler half of type1: keys, and which blocks a step may load and has to save.

It promises nothing to vLLM's scheduler. What it sends are offers: the worker loads what is in its store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvplug import compat
from kvplug.identity import Uncacheable, identity_of
from kvplug.keys import KeyChain
from kvplug.log import RateLimited, get_logger
from kvplug.lora import AdapterIdentities
from kvplug.requests import BlockTables
from kvplug.stats import Stats
from kvplug_type1.metadata import Announcement, LoadRequest, SaveRequest, Type1Metadata, Type1WorkerMetadata

__all__ = ["Type1Scheduler"]

_limited = RateLimited(get_logger(__name__))


@dataclass
class _Tracked:
    """A request that the scheduler has looked at and that hasn't finished."""

    request: Any
    #: None if its KV must not be stored or reused.
    chain: KeyChain | None
    #: Tokens that vLLM's own prefix cache had when the request was last looked up.
    num_local_tokens: int
    #: Blocks from the start that a save has been asked for.
    num_saved_blocks: int = 0
    #: Whether part of its KV isn't ours to vouch for: another connector brought it, or it is from before a reset.
    tainted: bool = False
    #: Whether it may share blocks of such a request whose load may still turn out to have failed.
    held: bool = False
    #: Whether a hit would still be the request's first.
    missed: bool = True
    #: Whether it was preempted, so that what it looks up now counts no more.
    resumed: bool = False


class Type1Scheduler:
    """Keeps keys and block tables of the requests, and turns each step into metadata."""

    def __init__(self, *, namespace: bytes, block_size: int, windowed: bool, steps_in_flight: int = 1) -> None:
        """Start without requests.

        Args:
            namespace: Fingerprint that every key starts from (32 bytes).
            block_size: Tokens per block.
            windowed: Whether blocks are freed while their request still runs (sliding window).
            steps_in_flight: Steps that may be scheduled before the first one's result is known.

        """
        self._namespace = namespace
        self._block_size = block_size
        self._windowed = windowed
        self._steps_in_flight = steps_in_flight
        # Steps until the result of the last one with another connector's loads is known.
        self._unsure_steps = 0
        self._tracked: dict[str, _Tracked] = {}
        self._tables = BlockTables()
        self._adapters = AdapterIdentities()
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
            tracked = _Tracked(request, self._new_chain(request), num_local_tokens or 0)
            self._tracked[request.request_id] = tracked
            self._unannounced[request.request_id] = None
        elif num_local_tokens is not None:
            tracked.num_local_tokens = num_local_tokens

    def _new_chain(self, request: Any) -> KeyChain | None:
        identity = identity_of(request, self._adapters)
        if isinstance(identity, Uncacheable):
            _limited.warning(
                ("uncacheable", identity.kind), "A request is neither stored nor reused: %s", identity.reason
            )
            return None
        return KeyChain(self._namespace, self._block_size, identity)

    def finish(self, request: Any) -> None:
        """Forget a request that finished, was aborted, or was never scheduled."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.request is request:
            del self._tracked[request.request_id]
            self._unannounced.pop(request.request_id, None)
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
        for tracked in self._tracked.values():
            tracked.tainted = True
        return True

    def build_metadata(self, scheduler_output: Any) -> Type1Metadata:
        """Turn one step of the scheduler into work for the worker half.

        Args:
            scheduler_output: vLLM's `SchedulerOutput`, complete, before the scheduler advances its own counts.

        """
        self._tables.update(scheduler_output)
        self._finished.clear()
        starting = self._tables.new | self._tables.resumed
        self._mark(scheduler_output, starting)
        loads: list[LoadRequest] = []
        saves: list[SaveRequest] = []
        for request_id, computed, scheduled in _scheduled(scheduler_output):
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.chain is None or tracked.tainted or request_id not in self._tables:
                continue
            # A token that isn't known yet (asynchronous scheduling) or isn't accepted yet (speculative decoding)
            # isn't in the request's list, and nothing from its position on is usable.
            end = min(computed + scheduled, len(tracked.request.all_token_ids)) // self._block_size
            if end <= tracked.num_saved_blocks and end <= computed // self._block_size:
                continue  # the common case: a decode step that fills no block
            if not self._keys(tracked):
                continue
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            last_token = computed + scheduled - drafts - 1
            if (load := self._load(tracked, request_id, computed, last_token, end)) is not None:
                loads.append(load)
                if request_id in self._tables.new:
                    self.stats.add("requests_looked_up")
                    self.stats.add("prefix_cache_queries", tracked.request.num_prompt_tokens - computed)
            if not tracked.held:
                saves.extend(self._save(tracked, request_id, computed, end, started=request_id in starting))
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
            keys = self._keys(tracked)
            if keys and not getattr(tracked.request, "skip_reading_prefix_cache", False):
                self.stats.add("requests_announced")
                yield Announcement(request_id, tuple(keys))

    def _keys(self, tracked: _Tracked) -> list[bytes]:
        """Return the keys of all full blocks of a request so far; none if it is neither stored nor reused."""
        if tracked.chain is None:
            return []
        try:
            tracked.chain.extend(tracked.request.all_token_ids)
        except ValueError as error:
            _limited.warning("keys", "A request is neither stored nor reused: %s", error)
            tracked.chain = None
            return []
        return tracked.chain.keys

    def _mark(self, scheduler_output: Any, starting: set[str]) -> None:
        """Find requests whose start another connector (under `MultiConnector`) loads in this step.

        Such a load may turn out to have failed once the step's result is in. Until then its blocks can be found in
        vLLM's own prefix cache, so requests that start meanwhile may share them, and are held.
        """
        if self._unsure_steps:
            self._unsure_steps -= 1
            if not self._unsure_steps:
                for known in self._tracked.values():
                    known.held = False
        may_load = compat.may_have_scheduler_side_loads(scheduler_output)
        for request_id, computed, _ in _scheduled(scheduler_output) if starting else ():
            tracked = self._tracked.get(request_id)
            if tracked is not None and request_id in starting:
                tracked.resumed = request_id in self._tables.resumed
                tracked.num_saved_blocks = 0  # also fills gaps that eviction left; what is stored isn't stored again
                tracked.tainted = may_load and computed > tracked.num_local_tokens
                if tracked.tainted:
                    self._unsure_steps = self._steps_in_flight
        if self._unsure_steps:
            for request_id in starting:
                if (tracked := self._tracked.get(request_id)) is not None:
                    tracked.held = True

    def _load(self, tracked: _Tracked, request_id: str, computed: int, last_token: int, end: int) -> LoadRequest | None:
        first = computed // self._block_size
        if min(end * self._block_size, last_token) <= computed:
            return None
        if request_id in self._tables.vetoes or getattr(tracked.request, "skip_reading_prefix_cache", False):
            return None
        assert tracked.chain is not None
        block_ids = tuple(self._tables.block_ids(request_id)[0][first:end])
        if 0 in block_ids:
            return None  # the null block: vLLM doesn't keep these positions
        return LoadRequest(
            request_id=request_id,
            num_computed_tokens=computed,
            first_token=first * self._block_size,
            keys=tuple(tracked.chain.keys[first:end]),
            block_ids=block_ids,
        )

    def _save(
        self, tracked: _Tracked, request_id: str, computed: int, end: int, *, started: bool
    ) -> Iterator[SaveRequest]:
        first = tracked.num_saved_blocks
        if self._windowed and not started:
            # Blocks behind the window may be someone else's by now.
            first = max(first, computed // self._block_size - 1)
        tracked.num_saved_blocks = max(end, tracked.num_saved_blocks)
        assert tracked.chain is not None
        pairs = [
            (key, block)
            for key, block in zip(
                tracked.chain.keys[first:end], self._tables.block_ids(request_id)[0][first:end], strict=True
            )
            if block != 0
        ]
        if pairs:
            keys, block_ids = zip(*pairs, strict=True)
            yield SaveRequest(request_id, keys, block_ids)


def _scheduled(scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """Iterate over (request id, computed tokens, scheduled tokens) of a step's requests."""
    scheduled = scheduler_output.num_scheduled_tokens
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.num_computed_tokens, scheduled[request.req_id]
    for request_id, _, computed in compat.cached_requests(scheduler_output):
        yield request_id, computed, scheduled[request_id]
