"""The connector that vLLM creates by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvplug.scheduled.connector import ScheduledConnector
from kvplug_pd_reuse.scheduler import PDReuseScheduler
from kvplug_pd_reuse.settings import PDReuseSettings
from kvplug_pd_reuse.worker import PDReuseWorker

if TYPE_CHECKING:
    from kvplug.scheduled.settings import ScheduledSettings

__all__ = ["PDReuseConnector"]


class PDReuseConnector(ScheduledConnector):
    """Hands prompts from prefill to decode engines over a shared store, and reuses what it has.

    A request says what it is in its `kv_transfer_params`, in the convention of vLLM's Nixl connector. The same
    settings serve both kinds of engines.
    """

    Settings: ClassVar[type[ScheduledSettings]] = PDReuseSettings
    # Every engine does both, whatever it is called: decode engines store what they generate.
    roles: ClassVar[tuple[str, ...]] = ("kv_both", "kv_producer", "kv_consumer")

    def _make_scheduler(self, settings: Any, **arguments: Any) -> PDReuseScheduler:
        config = self._vllm_config
        return PDReuseScheduler(
            settings,
            engine_id=str(config.kv_transfer_config.engine_id or ""),
            layout=(config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size),
            **arguments,
        )

    def _make_worker(self, settings: Any, **arguments: Any) -> PDReuseWorker:
        return PDReuseWorker(
            settings, vllm_config=None if settings.min_reuse_tokens else self._vllm_config, **arguments
        )

    def on_new_request(self, request: Any) -> None:
        """Take in a request that vLLM has just been given (0.22.1 on)."""
        scheduler = self.scheduler
        assert isinstance(scheduler, PDReuseScheduler)
        scheduler.new_request(request)
