"""A simulated worker: the bookkeeping of vLLM's model runners around a model that only hashes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvplug.testing.caches import BlockIds, Layer, copy_blocks, make_layers, zero_blocks
from kvplug.testing.errors import InvariantError, WrongKVError
from kvplug.testing.lifecycle import V1Lifecycle, V2Lifecycle
from kvplug.testing.model import VOCABULARY, TokenSequence
from kvplug.testing.ranks import Rank

__all__ = ["Worker"]


@dataclass
class _RequestState:
    sequence: TokenSequence
    prompt_len: int
    block_ids: tuple[list[int], ...]
    num_computed: int
    # Tokens whose ids are known: the prompt and what was sampled.
    num_tokens: int
    # Tokens computed when the running state was last written; None after a preemption.
    last_end: int | None = None
    tables: tuple[BlockIds, ...] = ()

    def refresh(self) -> None:
        self.tables = tuple(np.array(ids, np.int64) for ids in self.block_ids)


class Worker:
    """One rank: its caches, its requests, and the worker half of its connector.

    Args:
        rank: The rank's place.
        vllm_config: vLLM's configuration, as the rank has it.
        kv_cache_config: vLLM's `KVCacheConfig` of the rank.
        sequences: What every request means, by id; the simulation adds to it.
        v2: Whether to do as the second model runner does.
    """

    def __init__(
        self, rank: Rank, vllm_config: Any, kv_cache_config: Any, sequences: Mapping[str, TokenSequence], *, v2: bool
    ) -> None:
        self.rank, self.vllm_config = rank, vllm_config
        self._num_blocks = kv_cache_config.num_blocks
        self._sequences, self._v2 = sequences, v2
        self._requests: dict[str, _RequestState] = {}
        self.layers: list[Layer] = []
        #: Requests that read wrong KV in the last step, each with the first of it.
        self.failures: dict[str, WrongKVError] = {}
        #: The worker half, or None.
        self.connector: Any = None
        self._lifecycle: V1Lifecycle | V2Lifecycle | None = None
        if vllm_config.kv_transfer_config is not None:
            self._create_connector(kv_cache_config)
        self.layers = make_layers(kv_cache_config, rank=rank.rank, tensor_rank=rank.tensor_rank)
        self._context = self._make_context()
        if self.connector is not None:
            from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

            with rank.active():
                self.connector.register_kv_caches({layer.name: layer.tensor for layer in self.layers})
                self.connector.set_host_xfer_buffer_ops(copy_kv_blocks)

    def _create_connector(self, kv_cache_config: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        with self.rank.active(), set_current_vllm_config(self.vllm_config):
            self.connector = KVConnectorFactory.create_connector(
                config=self.vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
            )
        deferred = self.vllm_config.speculative_config is not None
        self._lifecycle = V2Lifecycle(self.connector) if self._v2 else V1Lifecycle(self.connector, deferred=deferred)

    def _make_context(self) -> Any:
        from vllm.forward_context import ForwardContext

        return ForwardContext(
            no_compile_layers={layer.name: SimpleNamespace(kv_cache=layer.tensor) for layer in self.layers},
            attn_metadata={layer.name: SimpleNamespace() for layer in self.layers},
            slot_mapping={},
        )

    # -- A step ----------------------------------------------------------------------------------------------------

    def execute(self, scheduler_output: Any) -> Any:
        """Run a step, and return vLLM's `ModelRunnerOutput`. What went wrong is in `failures` then."""
        self.failures = {}
        with self.rank.active() if self.connector is not None else nullcontext():
            if self._lifecycle is not None:
                self._lifecycle.before_update(scheduler_output)
            self._update_states(scheduler_output)
            return self._run(scheduler_output)

    def _run(self, scheduler_output: Any) -> Any:
        from vllm.forward_context import override_forward_context
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        scheduled = scheduler_output.num_scheduled_tokens
        forward: Callable[[], None] | None = None
        if scheduled:
            forward = lambda: self._forward(scheduler_output)  # noqa: E731 - the one line says it
        output = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
        if self._lifecycle is not None:
            options: dict[str, Any] = {}
            if scheduled:
                options = {
                    "scheduler_output": scheduler_output,
                    "request_state_indices": None,
                    "request_ids": list(scheduled),
                    "num_tokens": sum(scheduled.values()),
                }
            with override_forward_context(self._context):
                result = self._lifecycle.run(scheduler_output, self._context, forward, options)
            if scheduled or not result.is_empty():
                output.kv_connector_output = result
        elif forward is not None:
            forward()
        if scheduled and self.rank.is_last_stage:
            output.req_ids = list(scheduled)
            output.req_id_to_index = {request_id: index for index, request_id in enumerate(scheduled)}
            output.sampled_token_ids = [self._sample(request_id, scheduler_output) for request_id in scheduled]
        return output

    def _forward(self, scheduler_output: Any) -> None:
        saving = self.connector is not None and self.connector.has_connector_metadata()
        scheduled = [
            (request_id, self._requests[request_id], num_tokens, self._num_valid(request_id, scheduler_output))
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
        ]
        for layer in self.layers:
            if layer.is_state:
                for request_id, state, num_tokens, _ in scheduled:
                    with self._noting(request_id):
                        self._compute_state(layer, request_id, state, num_tokens)
                continue
            if saving:
                self.connector.wait_for_layer_load(layer.name)
            # A request may read what another one computes in the same step, so all are written first.
            for request_id, state, num_tokens, valid in scheduled:
                self._write(layer, request_id, state, num_tokens, valid)
            for request_id, state, num_tokens, valid in scheduled:
                start, table = state.num_computed, state.tables[layer.group]
                first = max(0, start - layer.window + 1) if layer.window else 0
                with self._noting(request_id):
                    layer.verify_tokens(request_id, state.sequence, table, first, start)
                if request_id in self.failures:
                    self._write(layer, request_id, state, num_tokens, valid)
            if saving:
                self.connector.save_kv_layer(layer.name, layer.tensor, self._context.attn_metadata[layer.name])
        for _, state, num_tokens, _ in scheduled:
            state.last_end = state.num_computed + num_tokens

    @contextmanager
    def _noting(self, request_id: str) -> Iterator[None]:
        """Keep what goes wrong for later: the connector may report at the end of the step that it knows."""
        try:
            yield
        except WrongKVError as error:
            self.failures.setdefault(request_id, error)

    def _write(self, layer: Layer, request_id: str, state: _RequestState, num_tokens: int, valid: int) -> None:
        start, table = state.num_computed, state.tables[layer.group]
        if len(table) * layer.block_size < start + num_tokens:
            raise InvariantError(f"request {request_id!r} has too few blocks for what is scheduled")
        # What is computed from wrong KV is wrong.
        valid = start if request_id in self.failures else valid
        layer.write_tokens(state.sequence, table, start, start + num_tokens, valid)

    def block_ids(self, request_id: str) -> set[int]:
        """Return the ids of all blocks in a request's tables."""
        return {block_id for ids in self._requests[request_id].block_ids for block_id in ids}

    def _compute_state(self, layer: Layer, request_id: str, state: _RequestState, num_tokens: int) -> None:
        table, size = state.tables[layer.group], layer.block_size
        start, end = state.num_computed, state.num_computed + num_tokens
        column = -(-end // size) - 1
        # Where the runner left the state, and where it is by the scheduler's account for a new request.
        source = (start - 1) // size if state.last_end is None else -(-state.last_end // size) - 1
        if layer.mode == "align" and start > 0 and source != column:
            layer.array[table[column]] = layer.array[table[source]]
            source = column
        if start > 0:
            layer.verify_state(request_id, state.sequence, int(table[source]), start)
        if layer.mode == "all":
            for boundary in range((start // size + 1) * size, end, size):
                layer.write_state(state.sequence, int(table[boundary // size - 1]), boundary)
        layer.write_state(state.sequence, int(table[column]), end)

    # -- Tokens ----------------------------------------------------------------------------------------------------

    def _num_valid(self, request_id: str, scheduler_output: Any) -> int:
        """Return the position after the last scheduled token that the request will keep."""
        state = self._requests[request_id]
        end = state.num_computed + scheduler_output.num_scheduled_tokens[request_id]
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
        position = int(end - len(drafts))
        for draft in drafts:
            if draft != state.sequence.token(position):
                break
            position += 1
        return position

    def _sample(self, request_id: str, scheduler_output: Any) -> list[int]:
        state = self._requests[request_id]
        end = state.num_computed + scheduler_output.num_scheduled_tokens[request_id]
        first = end - len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
        if first < state.num_tokens:
            return []
        if request_id in self.failures:
            return [(state.sequence.token(first) + 1) % VOCABULARY]
        last = self._num_valid(request_id, scheduler_output)
        return [state.sequence.token(position) for position in range(first, last + 1)]

    # -- What the runner keeps of the scheduler's output -------------------------------------------------------------

    def _update_states(self, scheduler_output: Any) -> None:
        gone = set(scheduler_output.finished_req_ids)
        if self._v2:
            gone |= scheduler_output.preempted_req_ids or set()
        for request_id in gone:
            self._requests.pop(request_id, None)
        if not self._v2:
            # Its cached state stays, but not where its last state was.
            for request_id in scheduler_output.preempted_req_ids or ():
                if request_id in self._requests:
                    self._requests[request_id].last_end = None
            self._change_blocks(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            self._add(request)
        self._update_cached(scheduler_output.scheduled_cached_reqs)
        if self._v2:
            self._change_blocks(scheduler_output)

    def _change_blocks(self, scheduler_output: Any) -> None:
        if block_ids := getattr(scheduler_output, "new_block_ids_to_zero", None):
            zero_blocks(self.layers, block_ids)
        if copies := getattr(scheduler_output, "kv_cache_block_copies", None):
            copy_blocks(self.layers, self._num_blocks, copies)

    def _add(self, request: Any) -> None:
        request_id = request.req_id
        if request_id in self._requests:
            raise InvariantError(f"request {request_id!r} came as new, and the worker has it already")
        tokens = getattr(request, "prefill_token_ids", None) if self._v2 else None
        tokens = list(request.prompt_token_ids if tokens is None else tokens)
        sequence = self._sequences[request_id]
        sequence.extend(len(tokens))
        if tokens != sequence.tokens[: len(tokens)]:
            raise InvariantError(f"request {request_id!r} came with other tokens than it was added with")
        state = _RequestState(
            sequence, len(request.prompt_token_ids), request.block_ids, request.num_computed_tokens, len(tokens)
        )
        state.refresh()
        self._requests[request_id] = state

    def _update_cached(self, cached: Any) -> None:
        for request_id, computed, new_block_ids, num_outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, cached.num_output_tokens, strict=True
        ):
            state = self._requests[request_id]
            state.num_computed, state.num_tokens = computed, state.prompt_len + num_outputs
            if request_id in cached.resumed_req_ids:
                state.block_ids, state.last_end = new_block_ids, None
                state.refresh()
            elif new_block_ids is not None:
                # In place, as the runner does: whoever kept these lists sees them grow.
                for ids, new in zip(state.block_ids, new_block_ids, strict=True):
                    ids.extend(new)
                state.refresh()

    def handshake_metadata(self) -> Any:
        """Return what the worker half has for its scheduler half, or None."""
        with self.rank.active():
            return self.connector.get_handshake_metadata()

    def shutdown(self) -> None:
        """Shut the connector's worker half down."""
        if self.connector is not None:
            with self.rank.active():
                self.connector.shutdown()
