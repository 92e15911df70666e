"""The arithmetic of shortening a step: what may be skipped, by how much, and what the runner is handed instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import repeat
from typing import Any

from kvplug import compat
from kvplug.requests import BlockTables
from kvplug.step import BlockIds, StepRequest

__all__ = ["StepPlan", "merge_counts"]


class StepPlan:
    """One step as the scheduler sent it, with the limits on shortening it.

    Everything is computed when asked for, for all requests at once: most steps are decodes in which nothing can be
    skipped, and those in which something can may have many requests.
    """

    def __init__(self, scheduler_output: Any, tables: BlockTables, block_sizes: tuple[int, ...]) -> None:
        """Look at a step.

        Args:
            scheduler_output: vLLM's `SchedulerOutput`. Never changed.
            tables: Block tables, updated with this step.
            block_sizes: Tokens per block of each KV-cache group.

        """
        self.scheduler_output = scheduler_output
        self.tables = tables
        self.block_sizes = block_sizes
        self._step = tables.num_steps

    @cached_property
    def left_alone(self) -> Mapping[str, str]:
        """Requests of which nothing may be skipped, with the reason: a stable name, for counters."""
        return self._left_alone()

    def _left_alone(self) -> dict[str, str]:
        output, tables = self.scheduler_output, self.tables
        reasons: dict[str, str] = {}
        if compat.has_scheduler_side_loads(output):
            reason = "scheduler_side_loads"
            reasons.update(dict.fromkeys(tables.new | tables.resumed, reason))
        if output.scheduled_encoder_inputs:
            reason = "encoder_inputs"  # their output would be skipped
            reasons.update(dict.fromkeys(output.scheduled_encoder_inputs, reason))
        reasons.update(tables.vetoes)
        reason = "unknown_blocks"
        reasons.update(dict.fromkeys(tables.unknown(output.num_scheduled_tokens), reason))
        return reasons

    @cached_property
    def limits(self) -> Mapping[str, int]:
        """How many of each scheduled request's tokens may be skipped: never the last one, never speculative ones."""
        output = self.scheduler_output
        limits = {request_id: scheduled - 1 for request_id, scheduled in output.num_scheduled_tokens.items()}
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            limits[request_id] = max(limits[request_id] - len(drafts), 0)
        for request_id in self.left_alone:
            if request_id in limits:
                limits[request_id] = 0
        return limits

    def computed_tokens(self) -> dict[str, int]:
        """Return the computed tokens, before this step, of every request that is scheduled in it."""
        computed = {r.req_id: r.num_computed_tokens for r in self.scheduler_output.scheduled_new_reqs}
        computed.update({request_id: n for request_id, _, n in compat.cached_requests(self.scheduler_output)})
        return computed

    def requests(self) -> dict[str, StepRequest]:
        """Build what a hook implementation sees of each scheduled request."""
        scheduled = self.scheduler_output.num_scheduled_tokens
        drafts = self.scheduler_output.scheduled_spec_decode_tokens
        # By `map`, since there may be hundreds of requests, and a loop would take twice as long.
        values = map(
            StepRequest,
            scheduled,
            map(self.computed_tokens().__getitem__, scheduled),
            scheduled.values(),
            repeat(self._block_ids),
            (len(drafts.get(request_id, ())) for request_id in scheduled) if drafts else repeat(0),
            map(self.tables.new.__contains__, scheduled),
            map(self.tables.resumed.__contains__, scheduled),
            map(self.limits.__getitem__, scheduled),
        )
        return dict(zip(scheduled, values, strict=True))

    def _block_ids(self, request_id: str) -> BlockIds:
        if self.tables.num_steps != self._step:
            raise RuntimeError(f"block ids of request {request_id!r} are read after their step: copy them in the hook.")
        if request_id not in self.tables:
            return ()
        return tuple(map(tuple, self.tables.block_ids(request_id)))

    def shorten(self, loaded: Mapping[str, int]) -> tuple[Any, dict[str, int], dict[str, str]]:
        """Turn counts of loaded tokens into the output for the runner.

        Args:
            loaded: Tokens of this step whose KV is in the paged cache, by request id, the same on all ranks.

        Returns:
            The output (the scheduler's own object if nothing is skipped), the skipped tokens by request id, and the
            reason for each request that had loaded tokens and was left alone.

        """
        limits, left_alone = self.limits, self.left_alone
        skipped = {
            request_id: count if count < limit else limit  # noqa: FURB136 - `min` would take longer than all the rest
            for request_id, count in loaded.items()
            if count > 0 and (limit := limits[request_id])
        }
        vetoed = {request_id: reason for request_id, reason in left_alone.items() if loaded.get(request_id, 0) > 0}
        if not skipped:
            return self.scheduler_output, skipped, vetoed
        blocks: frozenset[int] = frozenset()
        if compat.overwrites_blocks(self.scheduler_output):
            blocks = self._blocks_of_tokens({request_id: loaded[request_id] for request_id in skipped})
        return compat.shortened_output(self.scheduler_output, skipped, blocks), skipped, vetoed

    def running_counts(self, skipped: Mapping[str, int]) -> dict[str, int]:
        """Return the new counts of computed tokens of shortened requests that were already running."""
        cached = {request_id: count for request_id, _, count in compat.cached_requests(self.scheduler_output)}
        running = (cached.keys() & skipped.keys()) - self.tables.resumed
        return {request_id: cached[request_id] + skipped[request_id] for request_id in running}

    def _blocks_of_tokens(self, loaded: Mapping[str, int]) -> frozenset[int]:
        computed = self.computed_tokens()
        blocks: set[int] = set()
        for request_id, count in loaded.items():
            start = computed[request_id]
            for group, size in zip(self.tables.block_ids(request_id), self.block_sizes, strict=True):
                blocks.update(group[start // size : -(-(start + count) // size)])
        blocks.discard(0)  # the null block
        return frozenset(blocks)


def merge_counts(answers: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Merge what several plugins loaded, by maximum."""
    merged: dict[str, int] = {}
    for counts in answers:
        if not merged:
            merged = dict(counts)
            continue
        for request_id, count in counts.items():
            if count > merged.get(request_id, 0):
                merged[request_id] = count
    return merged
