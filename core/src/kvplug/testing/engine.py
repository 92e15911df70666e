"""vLLM's scheduler and the simulated workers, put together as vLLM's engine core does it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvplug.testing.configs import GroupSpec, kv_cache_configs, layer_specs, rank_config
from kvplug.testing.errors import WrongKVError
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
        on_promise: Called with request id, external tokens and blocks by group, as blocks for them were allocated.
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
        on_promise: Callable[[str, int, Any], None],
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
        self.scheduler: Any = None
        self.workers: list[Worker] = []
        self._aggregator: Any = None
        with contextlib.ExitStack() as stack:
            # Workers are made first, and shut down first.
            stack.callback(self._shutdown_scheduler)
            for rank, cache in enumerate(caches):
                place = Rank(rank, tensor_parallel, pipeline_parallel)
                worker = Worker(place, rank_config(vllm_config, rank), cache, sequences, v2=v2)
                self.workers.append(worker)
                stack.callback(worker.shutdown)
            with set_current_vllm_config(vllm_config):
                self.scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
                    vllm_config=vllm_config,
                    kv_cache_config=self.kv_cache_config,
                    structured_output_manager=StructuredOutputManager(vllm_config),
                    block_size=block_size,
                    hash_block_size=hash_block_size,
                    log_stats=True,
                )
            if self.scheduler.connector is not None:
                self._connect(self.scheduler.connector, on_promise)
            self._exit = stack.pop_all()
        self.max_in_flight = int(vllm_config.max_concurrent_batches)
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.block_hasher = get_request_block_hasher(hash_block_size, hash_function)

    def _connect(self, connector: Any, on_promise: Callable[[str, int, Any], None]) -> None:
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
                on_promise(request.request_id, num_external_tokens, blocks.blocks)
            after_alloc(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = record

    def execute(self, scheduler_output: Any, tolerated: set[str]) -> tuple[Any, set[str]]:
        """Run a step on all ranks.

        Args:
            scheduler_output: The step.
            tolerated: Requests of which vLLM doesn't know yet that a load failed in an earlier step.

        Returns:
            vLLM's `ModelRunnerOutput` as the executor would return it, and the requests with a load that failed.

        Raises:
            WrongKVError: A request read wrong KV, and the connector doesn't report its blocks as not loaded.
        """
        data = pickle.dumps(scheduler_output) if self._isolated else b""
        outputs = []
        failures: dict[str, WrongKVError] = {}
        tables: dict[str, set[int]] = {}
        for worker in self.workers:
            output = worker.execute(pickle.loads(data) if self._isolated else scheduler_output)  # noqa: S301 - our own
            outputs.append(pickle.loads(pickle.dumps(output)) if self._isolated else output)  # noqa: S301 - our own
            for request_id, error in worker.failures.items():
                failures.setdefault(request_id, error)
                tables[request_id] = worker.block_ids(request_id)
        output = outputs[self._output_rank]
        if self._aggregator is not None:
            output = self._aggregator.aggregate(outputs, self._output_rank)
        reported = output.kv_connector_output.invalid_block_ids if output.kv_connector_output else set()
        for request_id, error in failures.items():
            if request_id not in tolerated and not tables[request_id] & reported:
                raise error
        return output, set(failures)

    def shutdown(self) -> None:
        """Shut workers and scheduler down, once."""
        self._exit.close()

    def _shutdown_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.shutdown()
