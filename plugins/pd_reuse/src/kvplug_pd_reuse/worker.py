"""Worker half of pd_reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug.scheduled.worker import WorkerHalf
from kvplug_pd_reuse.break_even import measured

if TYPE_CHECKING:
    from kvplug.store.l2.client import L2Client

__all__ = ["PDReuseWorker"]


class PDReuseWorker(WorkerHalf):
    """Loads and saves blocks, as `WorkerHalf`, and measures at start which prompts are worth loading.

    Args:
        settings: Of pd_reuse.
        vllm_config: vLLM's `VllmConfig`, to measure how fast the model computes; None to measure nothing.
        arguments: Of `WorkerHalf`.

    """

    def __init__(self, settings: Any, *, vllm_config: Any = None, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self._vllm_config = vllm_config

    def measure(self, clients: Sequence[L2Client]) -> int:
        """Return the number of tokens from which on prompts are loaded; 0 if that is set, or can't be measured."""
        if self._vllm_config is None or self._paged is None or self._slab is None:
            return 0
        tiers = [client.tier for client in clients if client.health.works()]
        return measured(self._vllm_config, self._paged, self._slab, tiers, self._groups) or 0
