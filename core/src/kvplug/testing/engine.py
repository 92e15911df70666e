"""vLLM's scheduler and the simulated workers, put together as vLLM's engine core does it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvplug.testing.configs import GroupSpec, kv_cache_configs, layer_specs, rank_config
from kvplug.testing.model import TokenSequence
from kvplug.testing.ranks import Rank
from kvplug.testing.worker import Worker

__all__ = ["Engine"]


class Engine:
    """A scheduler, workers, and what is between them.

    Args:
        vllm_config: vLLM's configuration.
        groups: The model's layers.
        sequences: What every request means, by id.
        on_promise: Called with request id and external tokens whenever blocks were allocated for some.
        isolated: Whether scheduler and workers share no object. Always so with several ranks.
        v2: Whether workers do as the second model runner does.

    Attributes:
        kv_cache_config: vLLM's `KVCacheConfig` of the scheduler.
        workers: One per rank.
        scheduler: vLLM's scheduler.
        max_in_flight: Steps that may be scheduled before the first one's output is processed.
        block_hasher: For vLLM's requests.
    """

    def __init__(
        self,
        vllm_config: Any,
        groups: Sequence[GroupSpec],
        sequences: Mapping[str, TokenSequence],
        on_promise: Callable[[str, int], None],
        *,
        isolated: bool,
        v2: bool,
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.structured_output import StructuredOutputManager

        parallel = vllm_config.parallel_config
        tensor_parallel, pipeline_parallel = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        caches, self.kv_cache_config, block_size, hash_block_size = kv_cache_configs(
            vllm_config, layer_specs(groups, vllm_config)
        )
        self._isolated = isolated or len(caches) > 1
        self._output_rank = len(caches) - tensor_parallel
        self._exit = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            with set_current_vllm_config(vllm_config):
                self.scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
                    vllm_config=vllm_config,
                    kv_cache_config=self.kv_cache_config,
                    structured_output_manager=StructuredOutputManager(vllm_config),
                    block_size=block_size,
                    hash_block_size=hash_block_size,
                    log_stats=True,
                )
            stack.callback(self.scheduler.shutdown)
            self.workers: list[Worker] = []
            for rank, cache in enumerate(caches):
                place = Rank(rank, tensor_parallel, pipeline_parallel)
                worker = Worker(place, rank_config(vllm_config, rank), cache, sequences, v2=v2)
                self.workers.append(worker)
                stack.callback(worker.shutdown)
            self._aggregator: Any = None
            if self.scheduler.connector is not None:
                self._connect(self.scheduler.connector, on_promise)
            self._exit = stack.pop_all()
        self.max_in_flight = int(vllm_config.max_concurrent_batches)
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.block_hasher = get_request_block_hasher(hash_block_size, hash_function)

    def _connect(self, connector: Any, on_promise: Callable[[str, int], None]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        if len(self.workers) > 1:
            self._aggregator = KVOutputAggregator.from_connector(connector, len(self.workers))
        content = {}
        for worker in self.workers:
            if (metadata := worker.handshake_metadata()) is not None:
                content[worker.rank.stage, worker.rank.tensor_rank] = metadata
        if content and hasattr(connector, "set_xfer_handshake_metadata_pp_aware"):
            connector.set_xfer_handshake_metadata_pp_aware(content)
        elif content:
            connector.set_xfer_handshake_metadata({rank: metadata for (_, rank), metadata in content.items()})
        after_alloc = connector.update_state_after_alloc

        def record(request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                on_promise(request.request_id, num_external_tokens)
            after_alloc(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = record

    def execute(self, scheduler_output: Any) -> Any:
        """Run a step on all ranks, and return vLLM's `ModelRunnerOutput` as the executor would."""
        data = pickle.dumps(scheduler_output) if self._isolated else b""
        outputs = []
        for worker in self.workers:
            output = worker.execute(pickle.loads(data) if self._isolated else scheduler_output)  # noqa: S301 - our own
            outputs.append(pickle.loads(pickle.dumps(output)) if self._isolated else output)  # noqa: S301 - our own
        if self._aggregator is not None:
            return self._aggregator.aggregate(outputs, self._output_rank)
        return outputs[self._output_rank]

    def shutdown(self) -> None:
        """Shut workers and scheduler down, once."""
        self._exit.close()
