"""How plugins, the worker's connector and its runner come into a process."""

from __future__ import annotations

from matrixlib.checks import All, Has, ImportedOnlyBelow, InOrder, Says, Sets, Takes
from matrixlib.fact import Fact, fields

__all__ = ["FACTS"]

_CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"
_STATE = "vllm/distributed/kv_transfer/kv_transfer_state.py"
_FACTORY = f"{_CONNECTORS}/factory.py"
_MULTI = f"{_CONNECTORS}/v1/multi_connector.py"
_WORKER = "vllm/v1/worker/gpu_worker.py"
_PARALLEL = "vllm/distributed/parallel_state.py"
_CONFIG = "vllm/config/vllm.py"
_PLUGINS = "load_general_plugins()"

_PROCESSES = (
    Fact(
        "vLLM says which release it is",
        Has("vllm/__init__.py", "__version__"),
        "kvplug.compat.check_vllm_version",
    ),
    Fact(
        "plugins are the entry points of one group",
        Says("vllm/plugins/__init__.py", "DEFAULT_PLUGINS_GROUP", "'vllm.general_plugins'"),
        "kvplug.autoload",
    ),
    Fact(
        "the front end loads plugins before it makes a configuration",
        Says("vllm/engine/arg_utils.py", "EngineArgs.__post_init__", _PLUGINS),
        "kvplug.autoload",
    ),
    Fact(
        "the engine core loads plugins before its workers begin",
        InOrder("vllm/v1/engine/core.py", "EngineCore.__init__", (_PLUGINS, "executor_class(vllm_config)")),
        "kvplug_hooks.finder",
    ),
    Fact(
        "a worker loads plugins before its class",
        InOrder(
            "vllm/v1/worker/worker_base.py",
            "WorkerWrapperBase.init_worker",
            (_PLUGINS, "resolve_obj_by_qualname(parallel_config.worker_cls)"),
        ),
        "kvplug_hooks.finder",
    ),
    Fact(
        "only the worker's modules import the first runner",
        ImportedOnlyBelow("vllm.v1.worker.gpu_model_runner", "vllm/v1/worker"),
        "kvplug_hooks.finder",
        runners=("v1",),
    ),
    Fact(
        "only the worker's modules import the second runner",
        ImportedOnlyBelow("vllm.v1.worker.gpu.model_runner", "vllm/v1/worker"),
        "kvplug_hooks.finder",
        runners=("v2",),
    ),
    Fact(
        "connectors are registered by name, and loaded when they are asked for",
        All(
            (
                Takes(_FACTORY, "KVConnectorFactory.register_connector", ("name", "module_path", "class_name")),
                Says(_FACTORY, "KVConnectorFactory.register_connector", "cls._registry[name] = loader"),
                Has(_FACTORY, "KVConnectorFactory._registry"),
            )
        ),
        "kvplug.autoload",
    ),
)

_LIVE = (
    Fact(
        "a worker has one connector, and the runner is given the same",
        All(
            (
                Says(_STATE, "_KV_CONNECTOR_AGENT", "None"),
                Says(_STATE, "has_kv_transfer_group", "return _KV_CONNECTOR_AGENT is not None"),
                Says(_STATE, "get_kv_transfer_group", "return _KV_CONNECTOR_AGENT"),
            )
        ),
        "kvplug.compat.live_connector",
    ),
    Fact(
        "a method of the worker creates the connector, and the worker has its runner",
        All(
            (
                Says(_WORKER, "Worker.initialize_from_config", "ensure_kv_transfer_initialized(...)"),
                Sets(_WORKER, "Worker", "model_runner"),
            )
        ),
        "kvplug.compat.model_runner_in_use",
    ),
    Fact(
        "a MultiConnector has its children's metadata in their order",
        All(
            (
                Sets(_MULTI, "MultiConnector", "_connectors"),
                Says(_MULTI, "MultiKVConnectorMetadata", "metadata: tuple[KVConnectorMetadata, ...]"),
                Says(
                    _MULTI,
                    "MultiConnector.build_connector_meta",
                    "tuple(c.build_connector_meta(scheduler_output) for c in self._connectors)",
                ),
                Says(
                    _MULTI,
                    "MultiConnector.bind_connector_metadata",
                    "zip(self._connectors, connector_metadata.metadata)",
                ),
            )
        ),
        "kvplug.compat.connector_members",
    ),
    Fact(
        "tensor-parallel ranks can be told",
        All(
            (
                Has(_PARALLEL, "get_tp_group"),
                Sets(_PARALLEL, "GroupCoordinator", "ranks"),
                Sets(_PARALLEL, "GroupCoordinator", "rank_in_group"),
            )
        ),
        "kvplug.compat.tensor_parallel_ranks",
    ),
)

_CONFIGURATION = (
    Fact(
        "a variable asks for the second runner",
        Has("vllm/envs.py", "VLLM_USE_V2_MODEL_RUNNER"),
        "kvplug.compat.model_runner_in_use",
    ),
    Fact(
        "the configuration says which runner is used",
        Has(_CONFIG, "VllmConfig.use_v2_model_runner"),
        "kvplug.compat.model_runner_in_use",
        since="0.22.1",
    ),
    Fact(
        "pipeline and context parallelism can be told",
        All(
            tuple(
                Has("vllm/config/parallel.py", f"ParallelConfig.{kind}_parallel_size")
                for kind in ("pipeline", "prefill_context", "decode_context")
            )
        ),
        "kvplug.compat.split_dimensions",
    ),
    Fact(
        "the model's configuration asks for routed experts",
        Has("vllm/config/model.py", "ModelConfig.enable_return_routed_experts"),
        "kvplug.compat.returns_routed_experts",
        until="0.31.0",
    ),
    Fact(
        "a configuration of auxiliary outputs asks for routed experts",
        All(
            (
                Has(_CONFIG, "VllmConfig.aux_output_config"),
                Says(
                    "vllm/config/aux_output.py", "AuxOutputConfig.enabled", "return self.enable_return_routed_experts"
                ),
            )
        ),
        "kvplug.compat.returns_routed_experts",
        since="0.31.0",
    ),
    *fields(
        "vllm/v1/kv_cache_interface.py",
        "KVCacheConfig",
        "kvplug.dispatch",
        "num_blocks: int",
        "kv_cache_groups: list[KVCacheGroupSpec]",
    ),
    *fields(
        "vllm/v1/kv_cache_interface.py",
        "KVCacheGroupSpec",
        "kvplug.dispatch",
        "layer_names: list[str]",
        "kv_cache_spec: KVCacheSpec",
    ),
    *fields("vllm/v1/kv_cache_interface.py", "KVCacheSpec", "kvplug.dispatch", "block_size: int"),
)

FACTS = _PROCESSES + _LIVE + _CONFIGURATION
