"""Which blocks the scheduler half has saved after a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from kvplug import compat
from kvplug.provenance import Provenance
from kvplug.saves import SavePlanner, SaveProgress

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup
    from kvplug.requests import BlockTables
    from kvplug.scheduled.tracked import Tracked

__all__ = ["Completed", "SaveFinder"]

#: By group, keys and ids of blocks.
Completed = list[tuple[list[bytes], list[int]]]


class SaveFinder:
    """Finds the blocks of all requests that a step completes.

    Args:
        groups: The model's KV-cache groups.
        tables: Mirror of the block tables.
        steps_in_flight: Steps that may be scheduled before the first one's result is known.
        has_keys: Brings a request's keys up to date, and says whether there are any.

    Attributes:
        has_state: Whether there is recurrent state.
        alignment: Tokens at whose multiples all groups have whole blocks.

    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        tables: BlockTables,
        steps_in_flight: int,
        has_keys: Callable[[Tracked], bool],
    ) -> None:
        self._groups = tuple(groups)
        self._planner = SavePlanner(groups)
        self.has_state, self.alignment = self._planner.has_state, self._planner.alignment
        self._provenance = Provenance(steps_in_flight)
        self._tables = tables
        self._has_keys = has_keys
        self._tracked: dict[str, Tracked] = {}
        # By request, tokens before which there is nothing to save. Hundreds of requests that decode are told apart by
        # this alone: looking at each one would cost more than all else in a step.
        self._goals: dict[str, int] = {}

    def progress(self) -> SaveProgress:
        """Return the progress of a request that starts."""
        return self._planner.start()

    def track(self, tracked: Tracked) -> None:
        """Look for blocks of a request from now on."""
        self._tracked[tracked.request_id] = tracked
        self._goals[tracked.request_id] = 0

    def restart(self, tracked: Tracked) -> None:
        """Take in that a request starts with this step, or starts again: all of its blocks may be new."""
        tracked.progress = self._planner.start()
        tracked.tail_saved = False
        self._goals[tracked.request_id] = 0

    def forget(self, request_id: str) -> None:
        """Look for blocks of a request no more."""
        self._provenance.forget(request_id)
        self._tracked.pop(request_id, None)
        self._goals.pop(request_id, None)

    def start_step(self, starting: Sequence[tuple[str, bool]]) -> None:
        """Take in which requests start with this step, and whether each has KV of another connector."""
        self._provenance.start_step(starting)

    def reset(self, request_ids: Collection[str]) -> None:
        """Take in that what requests compute that are running now must not be saved."""
        self._provenance.reset(request_ids)

    def completed(self, scheduler_output: Any, starting: Collection[str]) -> tuple[Completed | None, bool]:
        """Return the blocks that a step completes; None if there aren't any.

        And whether there are prompts' ends among them, in blocks that aren't full.

        Args:
            scheduler_output: vLLM's `SchedulerOutput`.
            starting: Requests that start with this step, or start again.

        """
        drafts = scheduler_output.scheduled_spec_decode_tokens
        completed: Completed | None = None
        has_tails = False
        # The common case is a decode step that fills no block.
        for request_id, computed, scheduled in compat.requests_that_reach(scheduler_output, self._goals):
            tracked = self._tracked[request_id]
            # A token that isn't known yet (asynchronous scheduling) or isn't accepted yet (speculative decoding) isn't
            # in the request's list, and nothing from its position on is usable.
            known = min(computed + scheduled, len(tracked.request.all_token_ids))
            tables = self._tables.get(request_id)
            if known < self._goals[request_id] or tables is None:
                continue
            if not self._provenance.may_save(request_id) or not self._has_keys(tracked):
                continue
            assert tracked.keys is not None
            exact = known == computed + scheduled and request_id not in drafts
            planned = self._planner.plan(tracked.progress, computed, known, exact=exact, starts=request_id in starting)
            if completed is None:
                completed = [([], []) for _ in self._groups]
            for group, first, end in planned:
                keys, blocks = tracked.keys.by_group[group][first:end], tables[group][first:end]
                if 0 in blocks or len(keys) != len(blocks):
                    pairs = [(key, block) for key, block in zip(keys, blocks, strict=False) if block != 0]
                    keys, blocks = [key for key, _ in pairs], [block for _, block in pairs]
                completed[group][0].extend(keys)
                completed[group][1].extend(blocks)
            if tracked.save_tail_at and not tracked.tail_saved and known >= tracked.save_tail_at:
                has_tails = tracked.tail_saved = True
                self._add_tail(tracked, tables, completed, exact=exact and known == tracked.save_tail_at)
            following = tracked.progress.next_tokens
            if tracked.save_tail_at and not tracked.tail_saved:
                following = min(following, tracked.save_tail_at)
            self._goals[request_id] = following
        return completed, has_tails

    def _add_tail(
        self,
        tracked: Tracked,
        tables: Sequence[list[int]],
        completed: Completed,
        *,
        exact: bool,
    ) -> None:
        """Add the blocks in which a prompt ends, if they aren't full.

        Args:
            tracked: The request.
            tables: Its block ids, by group.
            completed: What to add to, by group: keys, and block ids.
            exact: Whether the step ends with the prompt. If not, recurrent state is that of later tokens.

        """
        assert tracked.keys is not None
        tail = tracked.keys.tail(tracked.request.all_token_ids, tracked.save_tail_at)
        for group, key in zip(self._groups, tail.keys, strict=True):
            position = (tail.tokens - 1) // group.block_size
            table = tables[group.index]
            if key is None or position >= len(table) or not table[position] or (group.kind == "state" and not exact):
                continue
            completed[group.index][0].append(key)
            completed[group.index][1].append(table[position])
