"""The hook: a worker-side call right before the model runner takes in the scheduler's output."""

from __future__ import annotations

from kvplug_hooks.patch import Before, FirstIn, Patch

__all__ = ["BY_RUNNER", "PATCHES", "V1", "V2"]

_PURPOSE = "Lets connectors load KV on the worker and shorten the step before the model runner updates its state."
_REMOVAL_CONDITION = (
    "vLLM calls connectors on the worker, with the scheduler's output, before both model runners update their "
    "state (asked for in vllm-project/vllm#39696)."
)
_IMPORT_FROM = "kvplug.dispatch"
_IMPORT_NAME = "before_update_states"
_CALL = "scheduler_output = before_update_states(self, scheduler_output)"

# The second runner takes no connectors yet.
_V1_ONLY = ("0.14.0", "0.14.1")
_BOTH = (
    "0.15.1",
    "0.16.0",
    "0.17.1",
    "0.18.1",
    "0.19.0",
    "0.19.1",
    "0.20.2",
    "0.21.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)

V1 = Patch(
    id="before_update_states.v1",
    purpose=_PURPOSE,
    removal_condition=_REMOVAL_CONDITION,
    module="vllm.v1.worker.gpu_model_runner",
    function="GPUModelRunner.execute_model",
    # After vLLM's own preemption call, before the local count is taken that the rest of the step uses.
    anchor=Before("num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens"),
    import_from=_IMPORT_FROM,
    import_name=_IMPORT_NAME,
    call=_CALL,
    known_releases=_V1_ONLY + _BOTH,
)

V2 = Patch(
    id="before_update_states.v2",
    purpose=_PURPOSE,
    removal_condition=_REMOVAL_CONDITION,
    module="vllm.v1.worker.gpu.model_runner",
    function="GPUModelRunner.execute_model",
    # The state update: dummy runs skip it.
    anchor=FirstIn(test="not dummy_run", calling="finish_requests"),
    import_from=_IMPORT_FROM,
    import_name=_IMPORT_NAME,
    call=_CALL,
    known_releases=_BOTH,
    older_releases="Before 0.15 the second model runner takes no connectors.",
)

PATCHES = (V1, V2)

#: The patch of each model runner, by the name that the command line uses.
BY_RUNNER = {"v1": V1, "v2": V2}
