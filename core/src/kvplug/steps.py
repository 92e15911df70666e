"""The arithmetic of shortening a step: what may be skipped, by how much, and what the runner is handed instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from kvplug import compat
from kvplug.requests import BlockTables
from kvplug.step import BlockIds, StepRequest

__all__ = ["StepPlan", "merge_counts"]


class StepPlan:
    """One step as the scheduler sent it, with the limits on shortening it.

    Everything is computed when asked for: most steps are decodes in which nothing can be skipped.
    """

    __slots__ = ("block_sizes", "scheduler_output", "scheduler_side_loads", "tables")

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
        #: Whether some request has tokens promised by a scheduler-side connector.
        self.scheduler_side_loads = compat.has_scheduler_side_loads(scheduler_output)

    def limit(self, request_id: str) -> tuple[int, str | None]:
        """Return how many of a request's scheduled tokens may be skipped, and why none may be.

        Never the last token, never speculative ones. The reason is a stable name, for counters; it is None where there
        is just nothing to skip.
        """
        output, tables = self.scheduler_output, self.tables
        reason = None
        if request_id not in tables:
            reason = "unknown_blocks"
        elif request_id in tables.vetoes:
            reason = tables.vetoes[request_id]
        elif request_id in output.scheduled_encoder_inputs:
            reason = "encoder_inputs"  # their output would be skipped
        elif self.scheduler_side_loads and (request_id in tables.new or request_id in tables.resumed):
            reason = "scheduler_side_loads"
        if reason is not None:
            return 0, reason
        limit: int = output.num_scheduled_tokens[request_id] - 1
        if request_id in output.scheduled_spec_decode_tokens:
            limit -= len(output.scheduled_spec_decode_tokens[request_id])
        return max(limit, 0), None

    def computed_tokens(self) -> dict[str, int]:
        """Return the computed tokens, before this step, of every request that is scheduled in it."""
        computed = {r.req_id: r.num_computed_tokens for r in self.scheduler_output.scheduled_new_reqs}
        computed.update({request_id: n for request_id, _, n in compat.cached_requests(self.scheduler_output)})
        return computed

    def requests(self) -> dict[str, StepRequest]:
        """Build what a hook implementation sees of each scheduled request."""
        computed = self.computed_tokens()
        drafts = self.scheduler_output.scheduled_spec_decode_tokens
        new, resumed = self.tables.new, self.tables.resumed
        return {
            request_id: StepRequest(
                request_id,
                num_computed_tokens=computed[request_id],
                num_scheduled_tokens=scheduled,
                block_ids=partial(self._frozen_block_ids, request_id, self.tables.num_steps),
                num_draft_tokens=len(drafts[request_id]) if request_id in drafts else 0,
                is_new=request_id in new,
                is_resumed=request_id in resumed,
                num_skippable_tokens=self.limit(request_id)[0],
            )
            for request_id, scheduled in self.scheduler_output.num_scheduled_tokens.items()
        }

    def _frozen_block_ids(self, request_id: str, step: int) -> BlockIds:
        if self.tables.num_steps != step:
            raise RuntimeError(f"block ids of request {request_id!r} are read after their step: copy them in the hook.")
        if request_id not in self.tables:
            return ()
        return tuple(tuple(group) for group in self.tables.block_ids(request_id))

    def shorten(self, loaded: Mapping[str, int]) -> tuple[Any, dict[str, int], dict[str, str]]:
        """Turn counts of loaded tokens into the output for the runner.

        Args:
            loaded: Tokens of this step whose KV is in the paged cache, by request id, the same on all ranks.

        Returns:
            The output (the scheduler's own object if nothing is skipped), the skipped tokens by request id, and the
            reason for each request that had loaded tokens and was left alone.

        """
        skipped: dict[str, int] = {}
        vetoed: dict[str, str] = {}
        for request_id, count in loaded.items():
            if count <= 0:
                continue
            limit, reason = self.limit(request_id)
            if reason is not None:
                vetoed[request_id] = reason
            elif limit > 0:
                skipped[request_id] = min(count, limit)
        if not skipped:
            return self.scheduler_output, skipped, vetoed
        blocks: frozenset[int] = frozenset()
        if compat.overwrites_blocks(self.scheduler_output):
            blocks = self._blocks_of_tokens({request_id: loaded[request_id] for request_id in skipped})
        return compat.shortened_output(self.scheduler_output, skipped, blocks), skipped, vetoed

    def running_counts(self, skipped: Mapping[str, int]) -> dict[str, int]:
        """Return the new counts of computed tokens of shortened requests that were already running."""
        cached = {request_id: count for request_id, _, count in compat.cached_requests(self.scheduler_output)}
        return {
            request_id: cached[request_id] + count
            for request_id, count in skipped.items()
            if request_id in cached and request_id not in self.tables.resumed
        }

    def _blocks_of_tokens(self, loaded: Mapping[str, int]) -> frozenset[int]:
        computed = self.computed_tokens()
        blocks: set[int] = set()
        for request_id, count in loaded.items():
            start = computed[request_id]
            for group, size in zip(self.tables.block_ids(request_id), self.block_sizes, strict=True):
                blocks.update(group[start // size : -(-(start + count) // size)])
        blocks.discard(0)  # the null block
        return frozenset(blocks)


def merge_counts(
    answers: Iterable[tuple[Mapping[str, int] | None, Collection[str] | None]], scheduled: Collection[str]
) -> dict[str, int]:
    """Merge what several plugins loaded, by maximum.

    Args:
        answers: Per plugin its counts, and the ids that they may name (None: any).
        scheduled: Ids of the requests in the step. Counts for others are dropped.

    Raises:
        TypeError: A count isn't a whole number.

    """
    merged: dict[str, int] = {}
    for counts, candidates in answers:
        for request_id, count in (counts or {}).items():
            if request_id not in scheduled or (candidates is not None and request_id not in candidates):
                continue
            if count > merged.get(request_id, 0):
                merged[request_id] = count
    return merged
