"""Worker half: copies blocks between the paged cache and its slab, beside compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvplug import compat
from kvplug.log import RateLimited, get_logger
from kvplug.paged import Transfer
from kvplug.paged.background import Background, Progress
from kvplug.paged.groups import PagedGroups
from kvplug.scheduled.layers import Layers
from kvplug.scheduled.metadata import Load, Part, Save, SlabHandshake, StepMetadata, WorkerReport
from kvplug.scheduled.running import Running
from kvplug.stats import Stats
from kvplug.store import Slab
from kvplug.store.directed import Executor
from kvplug.store.l2.value import HEADER_BYTES
from kvplug.store.memory import slots_within
from kvplug.store.tiered.make import make_clients, start_clients
from kvplug.store.tiered.peers import make_peers

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup
    from kvplug.paged.facts import PeerFacts
    from kvplug.scheduled.settings import ScheduledSettings
    from kvplug.store.l2.client import L2Client
    from kvplug.store.l2.peers import PeerClient

__all__ = ["WorkerHalf"]

logger = get_logger(__name__)
_limited = RateLimited(logger)

#: Seconds that a step without tokens waits for a transfer to end, so that an idle engine doesn't spin.
_IDLE_WAIT = 0.001


class WorkerHalf:
    """Loads and saves one worker's shard of the KV cache, into the slots that the scheduler half says.

    Args:
        settings: Of the connector.
        groups: The model's KV-cache groups.
        num_blocks: Blocks in the paged cache.
        shard: What part of every block this rank holds (`kvplug.namespace.shard_id`).
        rank: This rank's number, for reports.
        zeroes_early: Whether the model runner overwrites blocks before it tells the connector of the step.
        name: The connector's name, for messages.
        peers: What there is to know of engines with other parallel sizes whose blocks are to be found, too.

    """

    def __init__(
        self,
        settings: ScheduledSettings,
        *,
        groups: Sequence[KVGroup],
        num_blocks: int,
        shard: str,
        rank: int,
        zeroes_early: bool = False,
        name: str = "This connector",
        peers: PeerFacts | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._peers = peers
        self._groups = tuple(groups)
        self._num_blocks = num_blocks
        self._shard = shard
        self._rank = rank
        # Told of a block, vLLM computes from there on. It can't if blocks before aren't kept, or if there are others.
        self._fails_by_block = [group.kind for group in groups] == ["full"]
        self._layerwise = settings.layerwise
        self._within_step = settings.save_within_step or zeroes_early
        self._paged: PagedGroups | None = None
        self._paged_to_load: PagedGroups | None = None
        self._slab: Slab | None = None
        self._executor: Executor | None = None
        self._progress = Progress()
        self._reading: Background | None = None
        self._writing: Background | None = None
        self._layers: Layers | None = None
        self._metadata: StepMetadata | None = None
        self._loads: dict[int, Running] = {}
        self._saves: dict[int, Running] = {}
        self._ended_loads: dict[int, tuple[int, bool]] = {}
        self._ended_saves: dict[int, tuple[int, bool]] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._told_slab = False
        self._min_reuse_tokens = 0
        self._reported: dict[str, float] = {}
        self.stats = Stats()

    # -- Start and end -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the paged cache, and the memory that goes with it.

        Args:
            kv_caches: Tensor of each layer, by name.

        Raises:
            UnsupportedError: A layer's layout isn't understood, or there is a paged cache already.
            ConfigError: The memory doesn't hold a single block, or something that L2 needs isn't installed.
            KvplugError: The memory can't be had, or L2 can't be reached and is required.

        """
        if self._slab is not None:
            raise compat.two_engines(self._name)
        paged = self._paged = PagedGroups.from_kv_caches(kv_caches, self._groups, num_blocks=self._num_blocks)
        # On a GPU, a cache has a stream and a staging buffer: loads don't queue behind saves.
        self._paged_to_load = PagedGroups.from_kv_caches(kv_caches, self._groups, num_blocks=self._num_blocks)
        on_device = any(tensor.is_cuda for tensor in kv_caches.values())
        header_bytes = HEADER_BYTES if self._settings.tiers else 0
        num_slots = slots_within(self._settings.l1_size_per_rank, paged.slot_bytes, header_bytes)
        slab = self._slab = Slab(
            num_slots, paged.slot_bytes, header_bytes=header_bytes, pin=on_device, background=on_device
        )
        sizes = ", ".join(str(group.block_size) for group in self._groups)
        layout = f"{sizes} tokens; {paged.layout}"
        clients, keys = make_clients(
            self._settings,
            self.stats,
            slab,
            item_bytes=max(tensor.element_size() for tensor in kv_caches.values()),
            shard=self._shard,
            layout=layout,
        )
        peers: Sequence[PeerClient] = ()
        if self._peers is not None:
            peers, reasons = make_peers(
                self._peers,
                clients,
                self.stats,
                paged=paged,
                kv_caches=kv_caches,
                groups=self._groups,
                layout=layout,
                namespace=self._settings.l2_namespace,
            )
            for reason in reasons:
                logger.warning("kvplug: %s", reason)
        self._executor = Executor(clients, slab, keys, self._progress.notify, peers=peers)
        background = partial(Background, threaded=not on_device, notify=self._progress.notify)
        self._reading, self._writing = background(name="kvplug-load"), background(name="kvplug-save")
        if self._layerwise:
            self._layers = Layers(paged, self._paged_to_load, slab)
        try:
            start_clients(clients, required=self._settings.l2_required)
        except BaseException:
            self.close()
            raise
        self._min_reuse_tokens = self.measure(clients)
        logger.info(
            "kvplug: L1 holds %d blocks of %d bytes (%.2f GiB) in this rank",
            num_slots,
            paged.slot_bytes,
            slab.nbytes / 2**30,
        )

    def measure(self, clients: Sequence[L2Client]) -> int:
        """Return the number of tokens from which on it is worth to load any; 0 for no limit. For subclasses.

        Args:
            clients: The L2 tiers. The slab is used by nobody yet.

        """
        del clients
        return 0

    def slab(self) -> SlabHandshake | None:
        """Say what the scheduler half must know of this rank's slab; None before there is one."""
        if self._slab is None:
            return None
        return SlabHandshake(
            self._slab.num_slots,
            self._slab.header_bytes + self._slab.slot_bytes,
            self._settings.slab_sized_by,
            self._min_reuse_tokens,
        )

    def close(self) -> None:
        """Write to L2 what is on its way there, and give the host memory back. May be called again."""
        for background in (self._reading, self._writing):
            if background is not None:
                background.close()
        for running in [*self._loads.values(), *self._saves.values()]:
            running.wait()
        self._loads.clear()
        self._saves.clear()
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    # -- A step ------------------------------------------------------------------------------------------------------

    def begin(self, metadata: StepMetadata) -> None:
        """Make ready for a step, before it writes to any block. May be called several times for one.

        Args:
            metadata: The step's.

        """
        if metadata is self._metadata or self._executor is None:
            return
        self._metadata = metadata
        before = [self._saves[number] for number in metadata.overwritten if number in self._saves]
        if before:
            start = perf_counter()
            for save in before:
                save.hold_compute()
            self.stats.observe("overwrite_wait_seconds", perf_counter() - start)
        self._executor.execute(metadata.commands, metadata.epoch)

    def load(self, metadata: StepMetadata) -> None:
        """Start this step's loads.

        Args:
            metadata: The step's.

        """
        for load in metadata.loads:
            self._start_load(load)

    def _start_load(self, load: Load) -> None:
        running = self._loads[load.number] = Running(_block_ids(load.parts), load.request_id, load.asynchronous)
        if not load.complete:
            running.error = RuntimeError("vLLM asks for blocks that weren't promised")
            return
        # A block may have been given away while it is still being saved.
        before = [save for save in self._saves.values() if not running.block_ids.isdisjoint(save.block_ids)]
        try:
            if load.asynchronous:
                for part in load.parts:
                    running.transfers.append(self._reader.start(self._scatter(part, before)))
            else:
                assert self._layers is not None
                for save in before:
                    save.hold_compute()
                self._layers.start_loads(self._reader, load.parts, running.transfers)
        except Exception as error:  # noqa: BLE001 - a failed load is reported, whatever it was
            running.error = error

    def _scatter(self, part: Part, before: Sequence[Running]) -> Callable[[], Transfer]:
        assert self._paged_to_load is not None
        assert self._slab is not None
        cache, slab = self._paged_to_load.caches[part.group], self._slab
        transfers = [transfer for save in before for transfer in save.transfers]

        def copy() -> Transfer:
            for transfer in transfers:
                with suppress(Exception):  # a save that failed doesn't read any more
                    transfer.wait()
            return cache.scatter(slab, part.slots, part.block_ids, hold=False)

        return copy

    @property
    def _reader(self) -> Background:
        assert self._reading is not None
        return self._reading

    @property
    def _writer(self) -> Background:
        assert self._writing is not None
        return self._writing

    def wait_for_layer(self, name: str) -> None:
        """Let a layer's compute wait for its blocks.

        Args:
            name: The layer's name.

        """
        if self._layers is not None:
            try:
                self._layers.wait_for(name)
            except Exception as error:  # noqa: BLE001 - it is reported when the step ends
                _limited.warning("layer", "A load failed: %r", error)

    def save_layer(self, name: str) -> None:
        """Start saving a layer's blocks of this step, which are computed now.

        Args:
            name: The layer's name.

        """
        if self._layers is not None and self._metadata is not None and self._metadata.saves:
            self._layers.start_saves(self._writer, name, self._metadata.saves)

    def end(self, metadata: StepMetadata) -> None:
        """Start saving what this step completed, after it was computed.

        Args:
            metadata: The step's.

        """
        for save in metadata.saves:
            self._start_save(save)
        if self._layers is not None:
            self._layers.end_step()
        if self._within_step:
            for save in metadata.saves:
                self._saves[save.number].hold_compute()

    def _start_save(self, save: Save) -> None:
        running = self._saves[save.number] = Running(_block_ids(save.parts))
        try:
            if self._layers is not None:
                self._layers.finish_save(self._writer, save, running.transfers)
            else:
                for part in save.parts:
                    running.transfers.append(self._writer.start(self._gather(part)))
        except Exception as error:  # noqa: BLE001 - a failed save is a later miss, whatever it was
            running.error = error
        assert self._executor is not None
        self._executor.started(save.number, running.transfers, failed=running.error is not None)

    def _gather(self, part: Part) -> Callable[[], Transfer]:
        assert self._paged is not None
        assert self._slab is not None
        gather = self._paged.caches[part.group].gather
        return partial(gather, part.block_ids, self._slab, part.slots, hold=False)

    # -- Reports -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """See which transfers have ended. A step without tokens waits a moment for one that hasn't."""
        metadata = self._metadata
        if metadata is not None and metadata.idle and (self._loads or self._saves or self._settings.tiers):
            self._progress.wait(_IDLE_WAIT)
        for load in self._settle(self._loads, self._ended_loads, "load"):
            if load.asynchronous:
                self._finished.add(load.request_id)
            if load.error is None:
                self._count(load, "blocks_loaded", "loaded_bytes")
            elif self._fails_by_block:
                self._failed_blocks |= load.block_ids
            else:
                self._failed.add(load.request_id)
        for save in self._settle(self._saves, self._ended_saves, "save"):
            if save.error is None:
                self._count(save, "blocks_saved", "saved_bytes")

    def _settle(self, running: dict[int, Running], reports: dict[int, tuple[int, bool]], what: str) -> list[Running]:
        """Return the transfers that have ended, and keep what is to be reported of them."""
        ended = {number: one for number, one in running.items() if one.ended()}
        for number, one in ended.items():
            del running[number]
            reports[number] = (1, one.error is not None)
            if one.error is not None:
                self._went_wrong(what, one.error)
        return list(ended.values())

    def _count(self, running: Running, blocks: str, nbytes: str) -> None:
        assert self._slab is not None
        self.stats.add(blocks, len(running.block_ids))
        self.stats.add(nbytes, len(running.block_ids) * self._slab.slot_bytes)

    def _went_wrong(self, what: str, error: Exception) -> None:
        self.stats.add(f"{what}_errors")
        _limited.warning(
            (what, type(error)),
            "A %s failed, its blocks are %s: %s: %s",
            what,
            "computed" if what == "load" else "not stored",
            type(error).__name__,
            error,
        )

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose asynchronous loads have ended, and those of them that failed, once.

        The latter only where vLLM can't be told by block ids: where there is more than full attention.
        """
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Return the ids of blocks that couldn't be loaded, once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> WorkerReport | None:
        """Tell the scheduler half what has ended since the last report; None if nothing has."""
        if self._executor is None:
            return None
        loads, self._ended_loads = self._ended_loads, {}
        saves, self._ended_saves = self._ended_saves, {}
        answers = self._executor.take_answers()
        down = self._executor.take_down()
        slab = None if self._told_slab else self.slab()
        self._told_slab = True
        if not (loads or saves or answers or slab) and down is None:
            return None
        return WorkerReport(slab, loads, saves, answers, {} if down is None else {self._rank: down})

    def gauges(self) -> dict[str, float]:
        """Return how much host memory there is, and what is known of L2, if that has changed."""
        if self._executor is None or self._slab is None:
            return {}
        gauges: dict[str, float] = {"l1_capacity_bytes": self._slab.nbytes, **self._executor.gauges()}
        if gauges == self._reported:
            return {}
        self._reported = gauges
        return gauges


def _block_ids(parts: Sequence[Part]) -> frozenset[int]:
    return frozenset(block for part in parts for block in part.block_ids)
