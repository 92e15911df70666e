"""Model runners of a release whose state update is real, and which have stand-ins for the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from matrixlib.scenario import BLOCK_SIZE
from matrixlib.standins import StandIn, World

__all__ = ["GIVEN", "OWN", "Runner", "StateUpdated", "runner_of"]

_STATES = "vllm.v1.worker.gpu.states"

#: Modules that the runners import and that are executed, too.
OWN = ("vllm.v1.worker.gpu_input_batch", _STATES)

_MAX_REQUESTS = 8
_MAX_LENGTH = 1024


class StateUpdated(Exception):  # noqa: N818 - nothing is wrong
    """The runner has updated its state; what follows would compute."""


class Runner(Protocol):
    """What the harness does with a model runner."""

    #: `v1` or `v2`.
    kind: str
    #: The scheduler's output with which the last state update began.
    output: Any

    def execute_model(self, scheduler_output: Any) -> Any:
        """Take in a step, vLLM's own method."""

    def counts(self, name: str) -> set[int]:
        """Return the computed tokens of a request in all places where the runner keeps them."""

    def blocks(self, name: str) -> list[list[int]]:
        """Return a request's block ids."""

    def computed(self, scheduled: Mapping[str, int]) -> None:
        """Do to the state what computing the step does."""


def runner_of(kind: str, module: Any, world: World, log: list[str]) -> Runner:
    """Return a runner of a class that derives from the module's, as those of the platforms do.

    Args:
        kind: `v1` or `v2`.
        module: The runner's module, executed.
        world: The other modules.
        log: Gets the events of the state update.

    """
    module.copy_kv_cache_blocks_inplace = lambda *arguments: log.append(
        f"copy over {[block.dst_block_id for block in arguments[2]]}"
    )
    make: Callable[[Any, World, list[str]], Any] = _first if kind == "v1" else _second
    runner = make(module, world, log)
    runner.kind = kind
    runner.vllm_config = StandIn("vllm_config")
    for parallel in ("pipeline", "prefill_context", "decode_context"):
        setattr(runner.vllm_config.parallel_config, f"{parallel}_parallel_size", 1)
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_SIZE))
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[group, group], num_blocks=100)
    made: Runner = runner
    return made


# -- The first runner ------------------------------------------------------------------------------------------------


class _Batch:
    """The first runner's persistent batch, as far as it says who is in it."""

    def __init__(self) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.num_computed_tokens_cpu: dict[int, int] = {}
        self.prev_req_id_to_index = None

    def __getattr__(self, name: str) -> Any:
        return StandIn(f"input_batch.{name}")

    def add_request(self, request: Any) -> None:
        index = min(set(range(_MAX_REQUESTS)) - set(self.req_id_to_index.values()))
        self.req_id_to_index[request.req_id] = index
        self.num_computed_tokens_cpu[index] = request.num_computed_tokens

    def remove_request(self, name: str) -> None:
        self.req_id_to_index.pop(name, None)


def _first(module: Any, _world: World, log: list[str]) -> Any:
    module.get_pp_group = lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True)

    class First(module.GPUModelRunner):  # type: ignore[misc]
        def __init__(self) -> None:
            self.execute_model_state = self.prepare_inputs_event = self.speculative_config = None
            self.requests: dict[str, Any] = {}
            self.num_prompt_logprobs: dict[str, int] = {}
            self.encoder_cache: dict[str, Any] = {}
            self.input_batch = _Batch()
            self.uses_xdrope_dim = 0

        def __getattr__(self, name: str) -> Any:
            return StandIn(name)

        def _update_states(self, scheduler_output: Any) -> Any:
            log.append("state update")
            self.output = scheduler_output
            super()._update_states(scheduler_output)
            raise StateUpdated

        def _zero_block_ids(self, blocks: list[int]) -> None:
            log.append(f"zero {blocks}")

        def counts(self, name: str) -> set[int]:
            batch = self.input_batch
            in_batch = batch.num_computed_tokens_cpu[batch.req_id_to_index[name]]
            return {self.requests[name].num_computed_tokens, in_batch}

        def blocks(self, name: str) -> list[list[int]]:
            return [list(group) for group in self.requests[name].block_ids]

        def computed(self, scheduled: Mapping[str, int]) -> None:
            """Nothing: it takes its counts from the next step."""

    return First()


# -- The second runner -----------------------------------------------------------------------------------------------


class _Staged:
    """A tensor on a device that is written to from the host, in two steps."""

    def __init__(self, size: Any, *_args: Any, **_kwargs: Any) -> None:
        self.gpu = np.zeros(size, dtype=np.int64)
        self._staged: list[tuple[int, int]] = []

    def stage_write(self, index: int, start: int, values: Any) -> None:
        """Content of no interest here: token ids."""

    def stage_write_elem(self, index: int, value: int) -> None:
        self._staged.append((index, value))

    def apply_write(self) -> None:
        for index, value in self._staged:
            self.gpu[index] = value
        self._staged.clear()


class _Backed:
    """A tensor on the host that a device can read."""

    def __init__(self, size: Any, *_args: Any, **_kwargs: Any) -> None:
        self.np = self.gpu = np.zeros(size, dtype=np.int64)

    def copy_to_uva(self, *_args: Any) -> Any:
        return self.gpu


#: What modules contain that aren't executed, beside stand-ins.
GIVEN = {"vllm.v1.worker.gpu.buffer_utils": {"StagedWriteTensor": _Staged, "UvaBackedTensor": _Backed}}


class _Tables:
    """The second runner's block tables. The writes are applied when the state update ends."""

    def __init__(self) -> None:
        self.rows: dict[int, list[list[int]]] = {}

    def append_block_ids(self, index: int, blocks: Any, *, overwrite: bool) -> None:
        known = [[] for _ in blocks] if overwrite else self.rows[index]
        self.rows[index] = [[*old, *new] for old, new in zip(known, blocks, strict=True)]

    def apply_staged_writes(self) -> None:
        raise StateUpdated


def _second(module: Any, world: World, log: list[str]) -> Any:
    states = world.module(_STATES).RequestState
    sizes: dict[str, Any] = dict.fromkeys(inspect.signature(states).parameters, _MAX_REQUESTS)
    sizes |= {"max_model_len": _MAX_LENGTH, "device": StandIn("device")}
    module.post_update = lambda *_args, **_kwargs: None

    class Second(module.GPUModelRunner):  # type: ignore[misc]
        def __init__(self) -> None:
            self.req_states = states(**sizes)
            self.block_tables = _Tables()
            self.kv_block_zeroer = SimpleNamespace(zero_block_ids=lambda blocks: log.append(f"zero {blocks}"))
            self.encoder_cache = self.pooling_runner = self.adaptive_verification = self.pp_handler = None
            self.uses_mrope = self.supports_mm_inputs = False

        def __getattr__(self, name: str) -> Any:
            return StandIn(name)

        def finish_requests(self, scheduler_output: Any) -> None:
            log.append("state update")
            self.output = scheduler_output
            super().finish_requests(scheduler_output)

        def _index(self, name: str) -> int:
            index: int = self.req_states.req_id_to_index[name]
            return index

        def counts(self, name: str) -> set[int]:
            state, index = self.req_states, self._index(name)
            counts = {int(state.num_computed_tokens.gpu[index])}
            if hasattr(state, "num_computed_tokens_np"):
                counts.add(int(state.num_computed_tokens_np[index]))
            prefilled, prompt = int(state.num_computed_prefill_tokens[index]), int(state.prefill_len.np[index])
            return counts if prefilled == min(prompt, *counts) else counts | {prefilled}

        def blocks(self, name: str) -> list[list[int]]:
            return self.block_tables.rows[self._index(name)]

        def computed(self, scheduled: Mapping[str, int]) -> None:
            """Count on the device, and, up to 0.21, on the host."""
            indices = np.array([self._index(name) for name in scheduled], dtype=np.int64)
            numbers = np.array(list(scheduled.values()), dtype=np.int64)
            self.req_states.num_computed_tokens.gpu[indices] += numbers
            if hasattr(module.GPUModelRunner, "postprocess"):
                batch: Any = StandIn("input_batch")
                batch.idx_mapping_np, batch.num_scheduled_tokens = indices, numbers
                self.postprocess(batch, *map(StandIn, ("sampled_tokens", "num_sampled", "num_rejected")))

    return Second()
