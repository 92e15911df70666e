"""Block tables of running requests, mirrored from the scheduler's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvplug import compat

__all__ = ["BlockTables"]


class BlockTables:
    """Mirror of every running request's block ids, kept up to date from step to step.

    The scheduler sends only what changed. The mirror follows it through chunked prefill, decode, preemption and resume,
    whether a resumed request comes among the cached requests (first runner) or the new ones (second). It works on
    either side: in the scheduler half of a connector, and in the worker. A step costs what changed in it.

    Block ids that a sliding window has left behind stay in the mirror, as they do in vLLM's own worker-side tables;
    they may belong to someone else by then, so only blocks of tokens of the current step are safe to touch.

    A request whose first step the mirror didn't see isn't in it.
    """

    def __init__(self) -> None:
        """Start with no requests."""
        self._tables: dict[str, tuple[list[int], ...]] = {}
        #: Requests that must never be shortened, with the reason.
        self.vetoes: dict[str, str] = {}
        self._preempted: set[str] = set()
        #: Steps taken in so far.
        self.num_steps = 0
        #: Requests that lost their blocks since the last step.
        self.preempted: set[str] = set()
        #: Requests of the current step that come back after a preemption.
        self.resumed: set[str] = set()
        #: Requests of the current step that are scheduled for the first time.
        self.new: set[str] = set()

    def __len__(self) -> int:
        """Count the requests that are mirrored."""
        return len(self._tables)

    def __contains__(self, request_id: str) -> bool:
        """Say whether a request's table is known."""
        return request_id in self._tables

    def unknown(self, request_ids: Iterable[str]) -> list[str]:
        """Return those of the requests whose tables are not known."""
        return [request_id for request_id in request_ids if request_id not in self._tables]

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return a request's block ids, one list per KV-cache group. Not to be changed by the caller."""
        return self._tables[request_id]

    def get(self, request_id: str) -> tuple[list[int], ...] | None:
        """Return a request's block ids, as `block_ids`; None if its table isn't known."""
        return self._tables.get(request_id)

    def update(self, scheduler_output: Any) -> None:
        """Take in one step of the scheduler.

        Finished requests go first: an id that is aborted and submitted again between two steps is in the same output
        as finished and as new.

        Args:
            scheduler_output: vLLM's `SchedulerOutput`.

        """
        self.num_steps += 1
        self.preempted = set(compat.preempted_ids(scheduler_output))
        for request_id in scheduler_output.finished_req_ids:
            self._tables.pop(request_id, None)
            self.vetoes.pop(request_id, None)
            self._preempted.discard(request_id)
        for request_id in self.preempted:
            if self._tables.pop(request_id, None) is not None:
                self._preempted.add(request_id)
        if self.new:
            self.new = set()
        if self.resumed:
            self.resumed = set()
        self._take_new(scheduler_output)
        self._take_cached(scheduler_output)
        for request_id, blocks in compat.replaced_tables(scheduler_output).items():
            if request_id in self._tables:
                self._tables[request_id] = tuple(list(group) for group in blocks)

    def _take_new(self, scheduler_output: Any) -> None:
        requests = scheduler_output.scheduled_new_reqs
        if not requests:
            return
        tables = {request.req_id: _own(request.block_ids) for request in requests}
        for request_id in self._tables.keys() & tables.keys():
            if not _continues(self._tables[request_id], tables[request_id]):
                # Before 0.25.1 nobody says that reset_prefix_cache preempted it.
                self.preempted.add(request_id)
                self._preempted.add(request_id)
        self._tables.update(tables)
        started = tables.keys()
        self.resumed = started & self._preempted
        self.new = started - self.resumed
        self._preempted -= self.resumed
        for request_id in self.vetoes.keys() & started:  # streaming input: the same id comes as new again
            del self.vetoes[request_id]
        self.vetoes.update(compat.static_vetoes(requests))

    def _take_cached(self, scheduler_output: Any) -> None:
        resumed = compat.resumed_ids(scheduler_output.scheduled_cached_reqs)
        for request_id, blocks in compat.new_blocks(scheduler_output):
            if request_id in resumed:
                if request_id in self._tables:  # before 0.25.1 nobody says that reset_prefix_cache preempted it
                    self.preempted.add(request_id)
                self._tables[request_id] = _own(blocks or ())
                self._preempted.discard(request_id)
                self.resumed.add(request_id)
            elif blocks is not None and request_id in self._tables:
                for known, further in zip(self._tables[request_id], blocks, strict=True):
                    known.extend(further)


def _continues(known: tuple[list[int], ...], table: tuple[list[int], ...]) -> bool:
    """Return whether a block table still has the blocks that it had, but for those that a window has passed.

    A streaming session that goes on does, although it comes among the new requests again.
    """
    return all(
        len(before) <= len(now) and all(block in (0, old) for old, block in zip(before, now, strict=False))
        for before, now in zip(known, table, strict=True)
    )


def _own(block_ids: Sequence[list[int]]) -> tuple[list[int], ...]:
    """Copy the scheduler's lists. There is one KV-cache group as a rule, and there may be hundreds of new requests."""
    return (block_ids[0].copy(),) if len(block_ids) == 1 else tuple(map(list, block_ids))
