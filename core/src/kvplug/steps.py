"""The arithmetic of shortening a step: what may be skipped, by how much, and what the runner is handed instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvplug import compat
from kvplug.requests import BlockTables
from kvplug.step import StepRequest

__all__ = ["StepPlan", "merge_counts"]


@dataclass(frozen=True)
class StepPlan:
    """One step as the scheduler sent it, with the limits on shortening it.

    Everything is computed when asked for: most steps are decodes in which nothing can be skipped.
    """

    #: vLLM's `SchedulerOutput`. Never changed.
    scheduler_output: Any
    #: Block tables, updated with this step.
    tables: BlockTables
    #: Tokens per block of each KV-cache group.
    block_sizes: tuple[int, ...]
    #: Whether some request has tokens promised by a scheduler-side connector.
    scheduler_side_loads: bool = field(init=False)

    def __post_init__(self) -> None:
        """Ask once what each request's limit needs to know."""
        object.__setattr__(self, "scheduler_side_loads", compat.has_scheduler_side_loads(self.scheduler_output))

    def veto(self, request_id: str) -> str | None:
        """Return why a scheduled request must not be shortened in this step, or None.

        The reasons are stable names, for counters.
        """
        if request_id not in self.tables:
            return "unknown_blocks"
        if (reason := self.tables.veto(request_id)) is not None:
            return reason
        if request_id in self.scheduler_output.scheduled_encoder_inputs:
            return "encoder_inputs"  # their output would be skipped
        if self.scheduler_side_loads and (request_id in self.tables.new or request_id in self.tables.resumed):
            return "scheduler_side_loads"
        return None

    def num_skippable_tokens(self, request_id: str) -> int:
        """Return how many of a request's scheduled tokens may be skipped: not the last, nor speculative ones."""
        scheduled: int = self.scheduler_output.num_scheduled_tokens[request_id]
        if scheduled <= 1 or self.veto(request_id) is not None:
            return 0
        drafts = len(self.scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
        return max(0, scheduled - drafts - 1)

    def computed_tokens(self) -> dict[str, int]:
        """Return the computed tokens, before this step, of every request that is scheduled in it."""
        computed = {r.req_id: r.num_computed_tokens for r in self.scheduler_output.scheduled_new_reqs}
        computed.update({request_id: n for request_id, _, n in compat.cached_requests(self.scheduler_output)})
        return computed

    def requests(self) -> dict[str, StepRequest]:
        """Build what a hook implementation sees of each scheduled request."""
        output = self.scheduler_output
        computed = self.computed_tokens()
        return {
            request_id: StepRequest(
                request_id=request_id,
                num_computed_tokens=computed[request_id],
                num_scheduled_tokens=scheduled,
                num_draft_tokens=len(output.scheduled_spec_decode_tokens.get(request_id, ())),
                block_ids=tuple(tuple(group) for group in self.tables.block_ids(request_id))
                if request_id in self.tables
                else (),
                is_new=request_id in self.tables.new,
                is_resumed=request_id in self.tables.resumed,
                num_skippable_tokens=self.num_skippable_tokens(request_id),
            )
            for request_id, scheduled in output.num_scheduled_tokens.items()
        }

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
            if (reason := self.veto(request_id)) is not None:
                vetoed[request_id] = reason
                continue
            if (n := min(count, self.num_skippable_tokens(request_id))) > 0:
                skipped[request_id] = n
        if not skipped:
            return self.scheduler_output, skipped, vetoed
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
