"""Scheduler half: what is promised to vLLM's scheduler, and what a step loads and saves.

It owns the bookkeeping of host memory. Whatever it promises is pinned there until every rank has loaded it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvplug import compat
from kvplug.request_keys import KeyMaker
from kvplug.requests import BlockTables
from kvplug.scheduled.admission import Admission
from kvplug.scheduled.lookups import Lookups, wants_all_computed
from kvplug.scheduled.metadata import Load, Part, Save, SlabHandshake, StepMetadata, WorkerReport
from kvplug.scheduled.saves import SaveFinder
from kvplug.scheduled.tracked import Tracked
from kvplug.scheduled.transfers import Transfers
from kvplug.stats import Stats
from kvplug.store import SlotRef
from kvplug.store.directed import DirectedStore

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup
    from kvplug.scheduled.hits import Hit
    from kvplug.scheduled.settings import ScheduledSettings

__all__ = ["SchedulerHalf"]


class _Slots:
    """What there is once the workers have told what they have."""

    def __init__(self, scheduler: SchedulerHalf, slab: SlabHandshake) -> None:
        self.slab = slab
        self.store = DirectedStore(
            scheduler.settings,
            scheduler.stats,
            num_slots=slab.num_slots,
            value_bytes=slab.value_bytes,
            num_ranks=scheduler.num_ranks,
            num_peers=scheduler.num_peers,
        )
        self.transfers = Transfers(self.store, scheduler.num_ranks)
        self.lookups = Lookups(
            scheduler.settings,
            scheduler.groups,
            self.store,
            scheduler.stats,
            scheduler.admission,
            drop_last_hit=scheduler.drop_last_hit,
            tails=scheduler.tails,
        )


class SchedulerHalf:
    """Answers vLLM's scheduler, and turns each step into work for the workers.

    Subclasses decide more of a request when it is tracked (`prepare`) and when it has finished (`answer`).

    Args:
        settings: Of the connector.
        namespace: Fingerprint that every key starts from (32 bytes).
        groups: The model's KV-cache groups.
        num_ranks: Workers.
        drop_last_hit: See `kvplug.scheduled.hits.HitFinder`.
        steps_in_flight: Steps that may be scheduled before the first one's result is known.
        num_peers: Kinds of engines with other parallel sizes whose blocks are found, too.
        num_blocks: Blocks in the paged cache, or None where vLLM itself sees to it that requests that are loading
            can't keep each other from starting.

    """

    #: Whether saves go on to L2 in the workers at once. If not, that is the next step's, when all ranks have saved.
    writes_at_once: ClassVar[bool] = False
    #: Whether prompts' ends are looked for that are stored in blocks that aren't full.
    tails: ClassVar[bool] = False

    def __init__(
        self,
        settings: ScheduledSettings,
        *,
        namespace: bytes,
        groups: Sequence[KVGroup],
        num_ranks: int,
        drop_last_hit: bool,
        num_peers: int = 0,
        steps_in_flight: int = 1,
        num_blocks: int | None = None,
    ) -> None:
        self.settings = settings
        self.groups = tuple(groups)
        self.num_ranks = num_ranks
        self.num_peers = num_peers
        self.drop_last_hit = drop_last_hit
        self.admission = Admission(groups, num_blocks)
        self.stats = Stats()
        self._asynchronous = not settings.layerwise
        self._keys = KeyMaker(namespace, groups)
        self._tables = BlockTables()
        self._tracked: dict[str, Tracked] = {}
        self._saves = SaveFinder(groups, self._tables, steps_in_flight, self._has_keys)
        self._slots: _Slots | None = None
        # Requests whose load has ended, and that haven't been scheduled since; and whether the last step had no tokens.
        self._loaded: set[str] = set()
        self._was_idle = False
        self._new_loads: list[Load] = []
        # Saves that read blocks which another connector may load to in the next step.
        self._given_away: set[int] = set()
        self._down: dict[int, frozenset[str]] = {}
        self._reported_usage = 0

    # -- What there is -----------------------------------------------------------------------------------------------

    @property
    def store(self) -> DirectedStore:
        """The store. There is none before the workers have told what they have."""
        assert self._slots is not None
        return self._slots.store

    @property
    def num_tracked_requests(self) -> int:
        """Requests that are remembered. 0 when all have finished."""
        return len(self._tracked)

    @property
    def num_transfers(self) -> int:
        """Loads and saves that haven't ended."""
        return 0 if self._slots is None else len(self._slots.transfers)

    @property
    def num_parked(self) -> int:
        """Requests that are held back until something has come."""
        return 0 if self._slots is None else self._slots.lookups.num_parked

    def take_stats(self) -> dict[str, Any]:
        """Return what is new in the stats since the last call."""
        new = self.stats.take()
        if self._slots is not None:
            used = self.store.allocator.used * self._slots.slab.value_bytes * self.num_ranks
            if used != self._reported_usage:
                self._reported_usage = used
                new["l1_usage_bytes"] = {0: used}
        return new

    def has_pending_work(self) -> bool:
        """Say whether an idle engine must go on stepping: saves end, and commands reach the workers, in steps."""
        return self._slots is not None and (self._slots.transfers.keeps_stepping or self.store.has_commands)

    # -- Workers -----------------------------------------------------------------------------------------------------

    def set_slab(self, slab: SlabHandshake) -> None:
        """Take in what the workers have for slots. Once; later calls are ignored.

        Args:
            slab: What holds for all ranks.

        """
        if self._slots is None:
            self._slots = _Slots(self, slab)

    def take_report(self, report: WorkerReport) -> None:
        """Take in what became of transfers. What isn't known, or was reported by all ranks before, is ignored.

        Args:
            report: Of one rank, or of several.

        """
        if report.slab is not None:
            self.set_slab(report.slab)
        if self._slots is None:
            return
        for request_id, failed in self._slots.transfers.loads_ended(report.loads):
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.failed |= failed  # it is asked for again, and would fail again
                if self._asynchronous:
                    self._loaded.add(request_id)
        self._slots.transfers.saves_ended(report.saves)
        if report.down:
            self._down.update(report.down)
        if report.answers or report.down:
            self.store.answer(report.answers, frozenset().union(*self._down.values()))

    # -- Lookups and admission ---------------------------------------------------------------------------------------

    def match(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded beyond those that vLLM's own cache has.

        Args:
            request: vLLM's `Request`.
            num_local_tokens: Tokens in vLLM's own prefix cache.

        Returns:
            The number of tokens, all pinned; None if that is known soon. And whether they are loaded while the request
            waits.

        """
        tracked = self._track(request)
        tracked.num_local_tokens = num_local_tokens
        if self._has_to_be_passed_over(tracked):
            return None, False
        if self._slots is None or tracked.failed or wants_all_computed(request) or not self._has_keys(tracked):
            return 0, False
        return self._slots.lookups.match(tracked, num_local_tokens)

    def _has_to_be_passed_over(self, tracked: Tracked) -> bool:
        """Say whether vLLM must go on to other requests, since those that have loaded their blocks don't start.

        It goes through its queue up to the first request that gets no blocks. Where nothing runs, that may be one that
        lacks the blocks of those behind it, for ever.
        """
        self._loaded.discard(tracked.request_id)
        return bool(self._loaded) and self._was_idle

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked is not None:
                self._forget(tracked)
            tracked = Tracked(request, self._keys.start(request), self._saves.progress())
            self.prepare(tracked)
            self._tracked[request.request_id] = tracked
            self._saves.track(tracked)
        return tracked

    def prepare(self, tracked: Tracked) -> None:
        """Take in a request that is tracked from now on. For subclasses."""

    def _has_keys(self, tracked: Tracked) -> bool:
        if tracked.keys is not None and not self._keys.extend(tracked.keys, tracked.request):
            tracked.keys = None
        return tracked.keys is not None

    def admit(self, request: Any, block_ids: Sequence[list[int]], num_external_tokens: int) -> None:
        """Take in that vLLM has given a request its blocks, and start loading what was promised.

        Args:
            request: vLLM's `Request`.
            block_ids: Its block ids, by group.
            num_external_tokens: Tokens that this connector has promised, and is to load now. 0 if none are wanted.

        """
        tracked = self._track(request)
        if self._slots is None or tracked.hit is None:
            return
        hit, wait = tracked.hit, tracked.wait
        if num_external_tokens:
            tokens = hit.local + num_external_tokens
            parts, complete = self._parts(hit, block_ids, tokens)
            number = self._slots.transfers.start_load(tracked.request_id, self._slots.lookups.finder.take(hit))
            self._new_loads.append(Load(number, tracked.request_id, parts, self._asynchronous, complete))
            if self._asynchronous:
                self.admission.started(request)
            tracked.num_promised_tokens = num_external_tokens
            if wait is not None:
                tracked.fetched_from = wait.tiers
                if tracked.fetched_from:
                    tracked.num_fetched_tokens = max(0, tokens - max(wait.tokens_before, hit.local))
        self._slots.lookups.forget(tracked)
        self._count(tracked, num_external_tokens)

    def given_away(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        """Take in that vLLM has given a request blocks to which this connector loads nothing.

        Under `MultiConnector` another one may load to them, and the request is in no step before that has ended.

        Args:
            request: vLLM's `Request`.
            block_ids: Its block ids, by group; all empty where vLLM doesn't tell them (below 0.29).

        """
        if self._slots is None or not self._slots.transfers.saves:
            return
        transfers = self._slots.transfers
        if not any(block_ids):
            self._given_away.update(transfers.saves)
            return
        computed = self._track(request).num_local_tokens
        for group, table in zip(self.groups, block_ids, strict=True):
            self._given_away |= transfers.reading(table[computed // group.block_size :])

    def _parts(self, hit: Hit, block_ids: Sequence[list[int]], tokens: int) -> tuple[tuple[Part, ...], bool]:
        """Return what goes where, and whether that is all that must be loaded."""
        parts = []
        complete = True
        for group, table in zip(self.groups, block_ids, strict=True):
            blocks, slots = [], []
            for position in range(hit.local // group.block_size, -(-tokens // group.block_size)):
                block = table[position]
                if block == 0:
                    continue  # the null block: vLLM doesn't keep these positions
                ref = hit.slot(group.index, position)
                if ref is None:
                    complete = False
                else:
                    blocks.append(block)
                    slots.append(ref.slot)
            if blocks:
                parts.append(Part(group.index, tuple(blocks), tuple(slots)))
        return tuple(parts), complete

    def _count(self, tracked: Tracked, num_tokens: int) -> None:
        if tracked.request.num_preemptions:
            return
        self.stats.add("requests_looked_up")
        self.stats.add("prefix_cache_queries", len(tracked.request.all_token_ids) - tracked.num_local_tokens)
        if num_tokens:
            self.stats.add("prefix_cache_hits", num_tokens)
            self.stats.add("requests_hit")

    def sources(self, request: Any, num_tokens: int) -> tuple[int, int, frozenset[str]]:
        """Say where the tokens come from that were promised for a request.

        Args:
            request: vLLM's `Request`.
            num_tokens: How many they are.

        Returns:
            Tokens that were in L1; tokens that were fetched from L2, and the tiers of those.

        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return num_tokens, 0, frozenset()
        fetched = min(num_tokens, tracked.num_fetched_tokens)
        return num_tokens - fetched, fetched, tracked.fetched_from

    # -- Steps -------------------------------------------------------------------------------------------------------

    def build_metadata(self, scheduler_output: Any) -> StepMetadata:
        """Turn one step of the scheduler into work for the worker half.

        Args:
            scheduler_output: vLLM's `SchedulerOutput`, complete, before the scheduler advances its own counts.

        """
        self._tables.update(scheduler_output)
        self._was_idle = not scheduler_output.total_num_scheduled_tokens
        starting = self._tables.new | self._tables.resumed
        self._start(scheduler_output, starting)
        idle = not scheduler_output.total_num_scheduled_tokens
        if self._slots is None:
            return StepMetadata(idle=idle)
        # What saves of this step read isn't overwritten by it.
        overwritten = self._slots.transfers.reading(self._written_blocks(scheduler_output)) | self._given_away
        self._given_away = set()
        loads, self._new_loads = tuple(self._new_loads), []
        save = self._save(scheduler_output, starting)
        return StepMetadata(
            loads=loads,
            saves=() if save is None else (save,),
            overwritten=tuple(sorted(overwritten)),
            commands=self.store.take_commands(),
            epoch=self.store.epoch,
            idle=idle,
        )

    def _start(self, scheduler_output: Any, starting: set[str]) -> None:
        foreign = []
        if starting:
            may_load = compat.may_have_scheduler_side_loads(scheduler_output)
            for request_id, computed, _ in compat.scheduled_requests(scheduler_output):
                tracked = self._tracked.get(request_id)
                if request_id not in starting or tracked is None:
                    continue
                # vLLM's own hit may end within a block, of which a connector isn't told.
                known = tracked.num_local_tokens + tracked.num_promised_tokens + self._saves.alignment
                foreign.append((request_id, may_load and computed >= known))
                self._saves.restart(tracked)
                self._loaded.discard(request_id)
                tracked.num_promised_tokens = tracked.num_fetched_tokens = 0
                self.admission.ended(request_id)
        self._saves.start_step(foreign)

    def _save(self, scheduler_output: Any, starting: set[str]) -> Save | None:
        """Reserve slots for the blocks that the step completes, of all requests, as far as they aren't stored."""
        assert self._slots is not None
        completed, has_tails = self._saves.completed(scheduler_output, starting)
        if completed is None:
            return None
        parts: list[Part] = []
        refs: list[SlotRef] = []
        block_ids: list[int] = []
        allocator = self.store.allocator
        evicted, refused = allocator.evictions, allocator.refused
        for group, (keys, blocks) in enumerate(completed):
            reserved = self.store.reserve(keys)
            if None in reserved:
                blocks = [block for block, ref in zip(blocks, reserved, strict=True) if ref is not None]  # noqa: PLW2901
            slots = [ref for ref in reserved if ref is not None]
            if slots:
                refs += slots
                block_ids += blocks
                parts.append(Part(group, tuple(blocks), tuple([ref.slot for ref in slots])))
        self.stats.add("blocks_evicted", allocator.evictions - evicted)
        self.stats.add("saves_refused", allocator.refused - refused)
        if not parts:
            return None
        save = Save(self._slots.transfers.start_save(block_ids, refs), tuple(parts))
        if self.writes_at_once:
            self.store.write_after(save.number, refs)
        if has_tails and self._saves.has_state:
            # The next step may go on in the very block: later tokens go behind what is saved, but state is replaced.
            self._given_away.add(save.number)
        return save

    def _written_blocks(self, scheduler_output: Any) -> Iterator[int]:
        """Yield the blocks that a step may write to and that weren't the same request's before."""
        for request in scheduler_output.scheduled_new_reqs:
            for group, table in zip(self.groups, request.block_ids, strict=True):
                # What comes before is read, not written.
                yield from table[request.num_computed_tokens // group.block_size :]
        for _, blocks in compat.new_blocks(scheduler_output):
            for table in blocks or ():
                yield from table
        yield from compat.overwritten_blocks(scheduler_output)

    # -- Ends --------------------------------------------------------------------------------------------------------

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Forget a request that finished, was aborted, or was never scheduled. Its transfers go on by themselves.

        Returns:
            The `kv_transfer_params` of its answer, if it has any.

        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            return None
        answer = self.answer(tracked)
        del self._tracked[request.request_id]
        self._forget(tracked)
        return answer

    def answer(self, tracked: Tracked) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of a finished request's answer. For subclasses."""
        del tracked
        return None

    def _forget(self, tracked: Tracked) -> None:
        self._saves.forget(tracked.request_id)
        self._loaded.discard(tracked.request_id)
        self.admission.ended(tracked.request_id)
        if self._slots is not None:
            self._slots.lookups.forget(tracked)

    def reset(self) -> bool:
        """Forget everything stored, in L2 too, and return whether nothing of before can be read any more.

        What requests compute that are running now is based on KV from before: it isn't stored until they start again.
        False if some request is being loaded with KV from before.
        """
        self._saves.reset(self._tracked)
        if self._slots is None:
            return True
        for tracked in self._tracked.values():
            self._slots.lookups.forget(tracked)
        self.store.clear()
        return not self._slots.transfers.num_loads
