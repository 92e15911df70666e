"""What the model runners do with a step, and when."""

from __future__ import annotations

from matrixlib.checks import All, Has, Inherits, InOrder, Never, Says, Sets, Takes
from matrixlib.fact import Fact

__all__ = ["FACTS"]

_V1 = "vllm/v1/worker/gpu_model_runner.py"
_V2 = "vllm/v1/worker/gpu/model_runner.py"
_STATES = "vllm/v1/worker/gpu/states.py"
_BUFFERS = "vllm/v1/worker/gpu/buffer_utils.py"
_CONNECTOR = "vllm/v1/worker/gpu/kv_connector.py"
_EXECUTE = "GPUModelRunner.execute_model"

_PREEMPTIONS = "get_kv_transfer_group().handle_preemptions(_)"
_COUNT = "num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens"
_ZERO = "scheduler_output.new_block_ids_to_zero"
_COPY = "copy_kv_cache_blocks_inplace(_, _, scheduler_output.kv_cache_block_copies)"

_FIRST = (
    Fact(
        "the first runner tells of preemptions, counts, and then updates its state",
        InOrder(_V1, _EXECUTE, (_PREEMPTIONS, _COUNT, "self._update_states(scheduler_output)")),
        "the patch before_update_states.v1",
        runners=("v1",),
    ),
    Fact(
        "the first runner tells of preemptions by ids",
        Says(_V1, _EXECUTE, "get_kv_transfer_group().handle_preemptions(scheduler_output.preempted_req_ids)"),
        "a connector that has handle_preemptions, too,",
        until="0.19.0",
        runners=("v1",),
    ),
    Fact(
        "the first runner tells of preemptions by metadata",
        Says(_V1, _EXECUTE, "get_kv_transfer_group().handle_preemptions(kv_connector_metadata)"),
        "a connector that has handle_preemptions, too,",
        since="0.19.0",
        runners=("v1",),
    ),
    Fact(
        "the first runner zeroes blocks in its state update",
        Says(_V1, "GPUModelRunner._update_states", f"self._zero_block_ids({_ZERO})"),
        "kvplug.compat.overwrites_blocks",
        since="0.17.1",
        runners=("v1",),
    ),
    Fact(
        "the first runner copies blocks in its state update",
        Says(_V1, "GPUModelRunner._update_states", _COPY),
        "kvplug.compat.overwrites_blocks",
        since="0.26.0",
        runners=("v1",),
    ),
    Fact(
        "the first runner takes computed tokens from the step",
        Says(_V1, "GPUModelRunner._update_states", "num_computed_tokens = req_data.num_computed_tokens[i]"),
        "kvplug.compat.shortened_output",
        runners=("v1",),
    ),
)

_SECOND = (
    Fact(
        "the second runner updates its state before its connector learns of the step",
        InOrder(
            _V2,
            _EXECUTE,
            (
                "self.finish_requests(scheduler_output)",
                "self.free_states(scheduler_output)",
                "self.add_requests(scheduler_output)",
                "self.update_requests(scheduler_output)",
                "self.block_tables.apply_staged_writes()",
                "self.kv_connector.pre_forward(...)",
            ),
        ),
        "the patch before_update_states.v2",
        runners=("v2",),
    ),
    Fact(
        "the second runner tells of preemptions when it gets to its connector",
        Says(_CONNECTOR, "ActiveKVConnector.pre_forward", "self.kv_connector.handle_preemptions(_)"),
        "the patch before_update_states.v2",
        runners=("v2",),
    ),
    Fact(
        "the second runner takes its connector away during dummy runs",
        Says(_CONNECTOR, "ActiveKVConnector.set_disabled", "kv_transfer_state._KV_CONNECTOR_AGENT = _"),
        "kvplug.compat.live_connector",
        runners=("v2",),
    ),
    Fact(
        "the second runner forgets preempted requests",
        Says(_V2, "GPUModelRunner.finish_requests", "scheduler_output.preempted_req_ids"),
        "kvplug.requests",
        runners=("v2",),
    ),
    Fact(
        "the second runner zeroes blocks in its state update",
        Says(_V2, "GPUModelRunner.update_requests", f"self.kv_block_zeroer.zero_block_ids({_ZERO})"),
        "kvplug.compat.overwrites_blocks",
        since="0.23.0",
        runners=("v2",),
    ),
    Fact(
        "the second runner copies blocks in its state update",
        Says(_V2, "GPUModelRunner.update_requests", _COPY),
        "kvplug.compat.overwrites_blocks",
        since="0.26.0",
        runners=("v2",),
    ),
    Fact(
        "the second runner counts a request's tokens on the device",
        All(
            (
                Says(_STATES, "RequestState.__init__", "self.req_id_to_index: dict[str, int] = {}"),
                Says(_STATES, "RequestState.__init__", "self.num_computed_tokens = StagedWriteTensor(...)"),
                Sets(_BUFFERS, "StagedWriteTensor", "gpu"),
                Says(_V2, "GPUModelRunner.prepare_inputs", "self.req_states.num_computed_tokens.gpu"),
            )
        ),
        "kvplug.compat.set_device_computed_tokens",
        runners=("v2",),
    ),
    Fact(
        "the second runner counts a request's prefilled tokens on the host",
        All(
            (
                Sets(_STATES, "RequestState", "num_computed_prefill_tokens"),
                Sets(_STATES, "RequestState", "prefill_len"),
                Sets(_BUFFERS, "UvaBackedTensor", "np"),
            )
        ),
        "kvplug.compat.set_device_computed_tokens",
        runners=("v2",),
    ),
    Fact(
        "the second runner counts a request's tokens on the host, too",
        Sets(_STATES, "RequestState", "num_computed_tokens_np"),
        "kvplug.compat.set_device_computed_tokens",
        since="0.20.2",
        runners=("v2",),
    ),
    Fact(
        "the second runner moves its counts on the host by itself",
        Says(_V2, "GPUModelRunner.postprocess", "computed_prefill[idx_mapping_np] += input_batch.num_scheduled_tokens"),
        "kvplug.compat.set_device_computed_tokens",
        since="0.16.0",
        until="0.22.1",
        runners=("v2",),
    ),
    Fact(
        "the second runner takes its counts on the host from the step",
        Says(_V2, "GPUModelRunner.update_requests", "num_computed_tokens_np[req_index] = num_computed_tokens"),
        "kvplug.compat.set_device_computed_tokens",
        since="0.22.1",
        runners=("v2",),
    ),
    Fact(
        "complete block tables replace what is known in the second runner",
        Says(_V2, "GPUModelRunner.update_requests", "scheduler_output.block_table_updates"),
        "kvplug.requests",
        since="0.30.0",
        until="0.32.0",
        runners=("v2",),
    ),
)


def _of_each(runner: str, path: str) -> tuple[Fact, ...]:
    return (
        Fact(
            f"{runner}'s execute_model takes the scheduler's output first",
            All((Has(path, _EXECUTE), Takes(path, _EXECUTE, ("scheduler_output",)))),
            "the patch",
            runners=(runner,),
        ),
        Fact(
            f"{runner} has the configurations of vLLM and of the KV cache",
            All((Sets(path, "GPUModelRunner", "vllm_config"), Sets(path, "GPUModelRunner", "kv_cache_config"))),
            "kvplug.dispatch",
            runners=(runner,),
        ),
        Fact(
            f"{runner} keeps no step of the scheduler",
            Never(path, "GPUModelRunner", "self.scheduler_output = _"),
            "kvplug.compat.shortened_output",
            runners=(runner,),
        ),
    )


def _of_platform(runner: str, name: str, path: str, base: str, since: str | None = None) -> Fact:
    return Fact(
        f"{name} has {runner}'s execute_model",
        Inherits(path, name, base, "execute_model"),
        "kvplug.compat.hook_delivery",
        since=since,
        runners=(runner,),
    )


_PLATFORMS = (
    _of_platform("v1", "CPUModelRunner", "vllm/v1/worker/cpu_model_runner.py", "GPUModelRunner"),
    _of_platform("v1", "XPUModelRunner", "vllm/v1/worker/xpu_model_runner.py", "GPUModelRunner"),
    _of_platform("v2", "CPUModelRunner", "vllm/v1/worker/cpu/model_runner.py", "GPUModelRunner", "0.23.0"),
    _of_platform("v2", "XPUModelRunnerV2", "vllm/v1/worker/xpu_model_runner.py", "GPUModelRunnerV2", "0.18.1"),
)

FACTS = _FIRST + _SECOND + _PLATFORMS + _of_each("v1", _V1) + _of_each("v2", _V2)
