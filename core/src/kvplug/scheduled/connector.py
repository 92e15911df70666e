"""What vLLM creates of a connector that decides on the scheduler: a façade over a scheduler half and a worker half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvplug import compat
from kvplug.kv_groups import kv_groups
from kvplug.log import get_logger
from kvplug.memory_budget import check_memory, ranks_on_host
from kvplug.metrics import ConnectorStats, MetricsMixin
from kvplug.namespace import namespace_fingerprint, shard_id
from kvplug.paged.facts import PeerFacts
from kvplug.preemption import PreemptionMixin
from kvplug.scheduled.metadata import SlabHandshake, StepMetadata, WorkerReport, merge_slabs
from kvplug.scheduled.refusals import refuse_what_cannot_work
from kvplug.scheduled.scheduler import SchedulerHalf
from kvplug.scheduled.settings import ScheduledSettings
from kvplug.scheduled.worker import WorkerHalf

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["ScheduledConnector"]

logger = get_logger(__name__)


class ScheduledConnector(PreemptionMixin, MetricsMixin, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Base of connectors that reuse KV from host memory and from L2 tiers beyond it, decided on the scheduler.

    Hits count in vLLM's own budget, admission and metrics. Only what is pinned in host memory is promised. Transfers
    run beside compute.
    """

    #: What `kv_connector_extra_config` is validated by.
    Settings: ClassVar[type[ScheduledSettings]] = ScheduledSettings
    #: What vLLM's `kv_role` may be.
    roles: ClassVar[tuple[str, ...]] = ("kv_both",)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """Create one half of the connector.

        Args:
            vllm_config: vLLM's `VllmConfig`.
            role: Scheduler or worker.
            kv_cache_config: vLLM's `KVCacheConfig`.

        Raises:
            ConfigError: A setting is unknown, malformed, or asks for more memory than there is.
            UnsupportedError: This vLLM, model, parallelism or model runner can't work with the connector.

        """
        super().__init__(vllm_config, role, kv_cache_config)
        name = type(self).__name__
        settings = self.Settings.load(vllm_config.kv_transfer_config.kv_connector_extra_config)
        groups = kv_groups(kv_cache_config, name)
        refuse_what_cannot_work(vllm_config, role, groups, settings=settings, name=name, roles=self.roles)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        parallel = vllm_config.parallel_config
        own = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        # Both halves number them, so both must come to the same.
        peers = tuple(sizes for sizes in settings.peers if sizes != own) if settings.tiers else ()
        if role == KVConnectorRole.SCHEDULER:
            logger.info("kvplug: settings of %s: %s", name, settings.describe())
            if compat.load_failures_are_fatal(vllm_config):
                logger.info(
                    "kvplug: vLLM is set to fail a request whose KV can't be loaded. %s promises only what is in host "
                    "memory, so that doesn't happen to it short of a fault of memory; "
                    '"kv_load_failure_policy": "recompute" computes such a request instead.',
                    name,
                )
            speculative = vllm_config.speculative_config
            self._scheduler = self._make_scheduler(
                settings,
                namespace=namespace_fingerprint(vllm_config, kv_cache_config, model_id=settings.model_id),
                groups=groups,
                num_ranks=parallel.world_size,
                num_peers=len(peers),
                drop_last_hit=speculative is not None and speculative.use_eagle(),
                # Asynchronous scheduling plans a step while the one before it runs.
                steps_in_flight=2 if getattr(vllm_config.scheduler_config, "async_scheduling", False) else 1,
                num_blocks=None if compat.reserves_blocks_of_loads() else kv_cache_config.num_blocks,
            )
        else:
            # Workers come first, so this is where a size that can't be had is refused.
            check_memory(settings.l1_size_per_rank, ranks_on_host(parallel), what="L1")
            self._worker = self._make_worker(
                settings,
                groups=groups,
                num_blocks=kv_cache_config.num_blocks,
                shard=shard_id(vllm_config) if settings.tiers else "",
                rank=parallel.rank,
                zeroes_early=compat.overwrites_before_connectors(vllm_config, kv_cache_config),
                name=name,
                peers=PeerFacts.of(vllm_config, kv_cache_config, peers) if peers else None,
            )

    def _make_scheduler(self, settings: Any, **arguments: Any) -> SchedulerHalf:
        """Return the scheduler half."""
        return SchedulerHalf(settings, **arguments)

    def _make_worker(self, settings: Any, **arguments: Any) -> WorkerHalf:
        """Return a worker half."""
        return WorkerHalf(settings, **arguments)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss, so vLLM needn't wait for any."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Say whether layers must be left between CUDA graphs: where they are loaded and saved one by one."""
        return cls.Settings.load(extra_config).layerwise

    # -- worker half -------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> WorkerHalf:
        """The worker half. Only in a worker."""
        assert self._worker is not None, "this is the scheduler's half"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the worker's paged cache; see vLLM's base class."""
        self.worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> SlabHandshake | None:
        """Tell the scheduler half how many slots there are."""
        return self.worker.slab()

    def blocks_reused(self, metadata: Any) -> None:
        """Let saves of blocks end that this step gives to others."""
        if isinstance(metadata, StepMetadata):
            self.worker.begin(metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take a step's metadata, and start its loads, before anything is computed.

        vLLM calls this when it has zeroed and copied what it will, and `start_load_kv` only after the step's compute if
        nobody in the step waits for a load. A load that starts now can end with the step, so that its request is in
        the next one.
        """
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self.worker.begin(connector_metadata)
            self.worker.load(connector_metadata)

    def _step(self) -> StepMetadata | None:
        """Return the step's metadata; None in a dummy run."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        return metadata if isinstance(metadata, StepMetadata) else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: `bind_connector_metadata` has started this step's loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let a layer wait for its blocks, if they come layer by layer."""
        self.worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Start saving a layer's blocks, if they go layer by layer."""
        if self._step() is not None:
            self.worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Start saving the blocks that this step completed."""
        if (metadata := self._step()) is not None:
            self.worker.end(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Say which requests' loads have ended. Saves concern nobody: their blocks are freed at once."""
        self.worker.settle()
        finished, _ = self.worker.take_finished()
        return None, finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Say which requests' loads have ended, and which have failed (vLLM 0.30 on)."""
        self.worker.settle()
        return compat.transfer_results(*self.worker.take_finished())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that couldn't be loaded."""
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Tell the scheduler half what has become of transfers."""
        return self.worker.report()

    def shutdown(self) -> None:
        """Give the host memory back."""
        if self._worker is not None:
            self._worker.close()

    # -- scheduler half ----------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> SchedulerHalf:
        """The scheduler half. Only in the engine core."""
        assert self._scheduler is not None, "this is the worker's half"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Take in what the workers have for slots."""
        self._take_handshakes(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take in what the workers have for slots (vLLM 0.23 on)."""
        self._take_handshakes(metadata.values())

    def _take_handshakes(self, handshakes: Iterable[Any]) -> None:
        slab = None
        ours = self.scheduler.settings.slab_sized_by
        for handshake in handshakes:
            # Under MultiConnector they are those of its first connector: workers tell ours in their first reports.
            if not isinstance(handshake, SlabHandshake) or handshake.sized_by != ours:
                return
            slab = merge_slabs(slab, handshake)
        if slab is not None:
            self.scheduler.set_slab(slab)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Promise what is pinned in host memory; None if more is about to be there."""
        return self.scheduler.match(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Say which tiers the promised tokens come from (vLLM 0.32 on)."""
        return compat.cache_hit_sources(*self.scheduler.sources(request, num_external_tokens))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take in where the promised tokens go, or that somebody else's may go to these blocks."""
        block_ids = blocks.get_block_ids()
        if not num_external_tokens:
            self.scheduler.given_away(request, block_ids)
        self.scheduler.admit(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Build this step's work for the workers."""
        return self.scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers tell of a step."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerReport):
            self.scheduler.take_report(metadata)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its blocks can be freed at once: what still reads them is waited for before a write."""
        return False, self.scheduler.finish(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request, as `request_finished`."""
        return False, self.scheduler.finish(request)

    def has_pending_push_work(self) -> bool:
        """Keep an idle engine stepping until saves have ended and L2 knows what to do (vLLM 0.24 on)."""
        return self.scheduler.has_pending_work()

    def reset_cache(self) -> bool:
        """Forget everything stored, in L2 too."""
        return self.scheduler.reset()

    # -- metrics -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return what is new in this half's stats since the last call. vLLM asks both halves, once a step."""
        new = self.scheduler.take_stats() if self._worker is None else self._of_worker(self._worker)
        return ConnectorStats(data=new) if new else None

    def _of_worker(self, worker: WorkerHalf) -> dict[str, Any]:
        new, gauges = worker.stats.take(), worker.gauges()
        return self.stats_of_rank(new, gauges, compat.tensor_parallel_rank()) if new or gauges else {}
