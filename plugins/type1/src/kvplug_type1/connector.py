"""The connector that vLLM creates by name: a façade over the scheduler half and the worker half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

import kvplug
from kvplug import compat, dispatch
from kvplug.errors import UnsupportedError
from kvplug.kv_groups import KVGroup, kv_groups
from kvplug.log import get_logger
from kvplug.memory_budget import check_memory, ranks_on_host
from kvplug.metrics import ConnectorStats, MetricsMixin
from kvplug.namespace import namespace_fingerprint, shard_id
from kvplug.store.settings import StoreSettings
from kvplug_type1.metadata import Type1Metadata, Type1WorkerMetadata
from kvplug_type1.scheduler import Type1Scheduler
from kvplug_type1.worker import Type1Worker

if TYPE_CHECKING:
    import torch

__all__ = ["Type1Connector"]

logger = get_logger(__name__)


class Type1Connector(MetricsMixin, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Reuses KV from host memory and from L2 tiers beyond it, decided on the worker at load time.

    vLLM's scheduler plans every request as if nothing were stored. Right before a step, the hook loads what is there
    and the step gets shorter by that much. A miss or a failed load is just a smaller number.
    """

    #: What `kv_connector_extra_config` is validated by.
    Settings = StoreSettings

    #: Whether vLLM passes on what the worker half tells the scheduler half; None before that is known.
    _reports: bool | None = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """Create one half of the connector.

        Args:
            vllm_config: vLLM's `VllmConfig`.
            role: Scheduler or worker.
            kv_cache_config: vLLM's `KVCacheConfig`.

        Raises:
            ConfigError: A setting is unknown, malformed, or asks for more memory than there is.
            UnsupportedError: This vLLM, model, parallelism or model runner can't work with type1.

        """
        super().__init__(vllm_config, role, kv_cache_config)
        compat.require_hook_support(vllm_config, role, type(self))
        transfer = vllm_config.kv_transfer_config
        settings = StoreSettings.load(transfer.kv_connector_extra_config)
        groups = _attention_groups(kv_cache_config, type(self).__name__)
        self._scheduler: Type1Scheduler | None = None
        self._worker: Type1Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            logger.info("kvplug: type1 settings: %s", settings.describe())
            self._scheduler = Type1Scheduler(
                namespace=namespace_fingerprint(vllm_config, kv_cache_config, model_id=settings.model_id),
                groups=groups,
                # Asynchronous scheduling plans a step while the one before it runs.
                steps_in_flight=2 if getattr(vllm_config.scheduler_config, "async_scheduling", False) else 1,
            )
        else:
            # Workers come first, so this is where a size that can't be had is refused.
            check_memory(settings.l1_size_per_rank, ranks_on_host(vllm_config.parallel_config), what="L1")
            speculative = vllm_config.speculative_config
            self._worker = Type1Worker(
                settings,
                groups=groups,
                num_blocks=kv_cache_config.num_blocks,
                shard=shard_id(vllm_config) if settings.tiers else "",
                drop_last_hit=speculative is not None and speculative.use_eagle(),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss, so vLLM needn't wait for any."""
        return False

    # -- worker half -------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> Type1Worker:
        """The worker half. Only in a worker."""
        assert self._worker is not None, "this is the scheduler's half"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the worker's paged cache; see vLLM's base class."""
        self.worker.register_kv_caches(kv_caches)

    @kvplug.hookimpl
    def before_update_states(self, step: kvplug.Step) -> Mapping[str, int]:
        """Load what is stored of this step's blocks."""
        return self.worker.load(step.metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: the hook has loaded already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: the hook has loaded already."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved whole when the step has run, draft model included."""

    def wait_for_save(self) -> None:
        """Save the blocks that this step completed."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        if isinstance(metadata, Type1Metadata):
            self.worker.save(metadata)

    def build_connector_worker_meta(self) -> Type1WorkerMetadata | None:
        """Tell the scheduler half what came of this step's loads, where vLLM asks (`compat.reports_to_scheduler`)."""
        dispatcher = dispatch.current_dispatcher()
        return None if dispatcher is None else self.worker.report(dispatcher.skipped)

    def shutdown(self) -> None:
        """Give the host memory back."""
        if self._worker is not None:
            self._worker.close()

    # -- scheduler half ----------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Type1Scheduler:
        """The scheduler half. Only in the engine core."""
        assert self._scheduler is not None, "this is the worker's half"
        return self._scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Promise nothing; remember the request."""
        self.scheduler.track(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember the request."""
        self.scheduler.track(request)

    def build_connector_meta(self, scheduler_output: Any) -> Type1Metadata:
        """Build this step's work for the workers."""
        return self.scheduler.build_metadata(scheduler_output)

    def on_new_request(self, request: Any) -> None:
        """Announce the request to the workers. vLLM calls this from 0.22.1 on, as requests arrive."""
        self.scheduler.track(request)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers tell of a step."""
        # Before 0.18.1 there is no such field.
        metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(metadata, Type1WorkerMetadata):
            self.scheduler.take_report(metadata)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its blocks can be freed at once: saves are done within the step."""
        self.scheduler.finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request, as `request_finished`."""
        self.scheduler.finish(request)
        return False, None

    def reset_cache(self) -> bool:
        """Have the workers forget everything stored, in L2 too, before the next step loads anything."""
        return self.scheduler.reset()

    # -- metrics -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return what is new in this half's stats since the last call. vLLM asks both halves, once a step."""
        new = self.scheduler.stats.take() if self._worker is None else self._of_worker()
        return ConnectorStats(data=new) if new else None

    def _of_worker(self) -> dict[str, Any]:
        new = self.worker.stats.take()
        if (dispatcher := dispatch.current_dispatcher()) is not None:
            new.update(dispatcher.stats.take())
            if self._reports is None:
                self._reports = compat.reports_to_scheduler(dispatcher.runner_class)
            if not self._reports and (report := self.worker.report(dispatcher.skipped)) is not None:
                # The scheduler half isn't told, so the answer is counted here.
                new["prefix_cache_hits"] = sum(report.skipped.values())
        gauges = self.worker.gauges()
        return self.stats_of_rank(new, gauges, compat.tensor_parallel_rank()) if new or gauges else {}


def _attention_groups(kv_cache_config: Any, name: str) -> tuple[KVGroup, ...]:
    """Return the model's KV-cache groups, or refuse those that type1 can't work with.

    A step that is shortened starts where vLLM doesn't know that it does. Attention has all it needs in blocks that the
    step was given anyway. Recurrent state is read and written where vLLM's plan of the step says.
    """
    groups = kv_groups(kv_cache_config, name)
    if not groups:
        raise UnsupportedError(f"{name} has nothing to store: this model has no KV cache, serve it without.")
    if states := [layer for group in groups if group.kind == "state" for layer in group.page_size_bytes]:
        raise UnsupportedError(
            f"{name} can't load recurrent state, which vLLM keeps where it plans to go on, and this model has some "
            f"(layer {states[0]} and others): use Type2Connector of kvplug-type2, or serve this model without a "
            "connector."
        )
    return groups
