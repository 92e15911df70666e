"""What connectors, ours among them, are asked for and may ask."""

from __future__ import annotations

from matrixlib.checks import Abstract, All, Has, InOrder, Says, Sets, Takes
from matrixlib.fact import Fact, fields

__all__ = ["FACTS"]

_BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
_METRICS = "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_MIXIN = "vllm/v1/worker/kv_connector_model_runner_mixin.py"
_LIFECYCLE = "KVConnectorModelRunnerMixin._get_kv_connector_output"
_SECOND = "vllm/v1/worker/gpu/kv_connector.py"
_REQUEST = "vllm/v1/request.py"
_SPECS = "vllm/v1/kv_cache_interface.py"
_CLASS = "KVConnectorBase_V1"

_INTERFACE = (
    Fact(
        "a connector must have seven methods and no more",
        Abstract(
            _BASE,
            _CLASS,
            (
                "start_load_kv",
                "wait_for_layer_load",
                "save_kv_layer",
                "wait_for_save",
                "get_num_new_matched_tokens",
                "update_state_after_alloc",
                "build_connector_meta",
            ),
        ),
        "kvplug_type1.connector",
    ),
    Fact(
        "a connector is made of a configuration, a role and a KV-cache configuration",
        Takes(_BASE, f"{_CLASS}.__init__", ("vllm_config", "role", "kv_cache_config")),
        "kvplug.connectors",
    ),
    Fact(
        "a connector has the methods that type1 overrides or calls",
        All(
            tuple(
                Has(_BASE, f"{_CLASS}.{name}")
                for name in (
                    "_get_connector_metadata",
                    "build_kv_connector_stats",
                    "build_prom_metrics",
                    "get_kv_connector_stats",
                    "has_connector_metadata",
                    "register_kv_caches",
                    "request_finished",
                    "reset_cache",
                    "shutdown",
                    "update_connector_output",
                )
            )
        ),
        "kvplug_type1.connector",
    ),
    Fact(
        "a connector's role is scheduler or worker",
        All((Has(_BASE, "KVConnectorRole.SCHEDULER"), Has(_BASE, "KVConnectorRole.WORKER"))),
        "kvplug.compat.require_hook_support",
    ),
    Fact(
        "handle_preemptions takes ids",
        Takes(_BASE, f"{_CLASS}.handle_preemptions", ("preempted_req_ids",)),
        "a connector that has it, too,",
        until="0.19.0",
    ),
    Fact(
        "handle_preemptions takes metadata",
        Takes(_BASE, f"{_CLASS}.handle_preemptions", ("kv_connector_metadata",)),
        "a connector that has it, too,",
        since="0.19.0",
    ),
    Fact(
        "a worker's connector may tell the scheduler's of a step",
        All(
            (
                Has(_BASE, "KVConnectorWorkerMetadata"),
                Has(_BASE, f"{_CLASS}.build_connector_worker_meta"),
                Has("vllm/v1/outputs.py", "KVConnectorOutput.kv_connector_worker_meta"),
            )
        ),
        "kvplug.compat.worker_metadata_class",
        since="0.18.1",
    ),
    Fact(
        "the first runner asks what there is to tell",
        Says(_MIXIN, _LIFECYCLE, "kv_connector.build_connector_worker_meta()"),
        "kvplug_type1.connector",
        since="0.18.1",
        runners=("v1",),
    ),
    Fact(
        "the second runner asks what there is to tell",
        Says(_SECOND, "ActiveKVConnector.post_forward", "self.kv_connector.build_connector_worker_meta()"),
        "kvplug_type1.connector",
        since="0.20.2",
        runners=("v2",),
    ),
    Fact(
        "a connector is told of new requests",
        All(
            (
                Has(_BASE, f"{_CLASS}.on_new_request"),
                Says(_SCHEDULER, "Scheduler", "self.connector.on_new_request(request)"),
            )
        ),
        "kvplug_type1.connector",
        since="0.22.1",
    ),
    Fact(
        "a connector may say that it owes nobody its saves",
        Has(_BASE, f"{_CLASS}.requires_kv_delivery"),
        "kvplug_type1.connector",
        since="0.27.1",
    ),
)

_CALLS = (
    Fact(
        "the scheduler asks for matches, tells of blocks, and lets metadata be built",
        All(
            (
                Says(_SCHEDULER, "Scheduler.schedule", "self.connector.get_num_new_matched_tokens(...)"),
                Says(_SCHEDULER, "Scheduler.schedule", "self.connector.update_state_after_alloc(...)"),
                Says(_SCHEDULER, "Scheduler", "_.build_connector_meta(scheduler_output)"),
            )
        ),
        "kvplug_type1.scheduler",
    ),
    Fact(
        "the scheduler tells of a request's end",
        Says(_SCHEDULER, "Scheduler._connector_finished", "self.connector.request_finished(...)"),
        "kvplug_type1.scheduler",
    ),
    Fact(
        "the scheduler's half is asked for its stats, too",
        Says(_SCHEDULER, "Scheduler", "self.connector.get_kv_connector_stats()"),
        "kvplug_type1.connector",
    ),
    Fact(
        "the first runner waits for saves and asks for stats when a step has run",
        InOrder(
            _MIXIN,
            _LIFECYCLE,
            ("yield output", "kv_connector.wait_for_save()", "kv_connector.get_kv_connector_stats()"),
        ),
        "kvplug_type1.worker",
        runners=("v1",),
    ),
    Fact(
        "the second runner waits for saves and asks for stats when a step has run",
        InOrder(
            _SECOND,
            "ActiveKVConnector.post_forward",
            ("self.kv_connector.wait_for_save()", "self.kv_connector.get_kv_connector_stats()"),
        ),
        "kvplug_type1.worker",
        runners=("v2",),
    ),
    Fact(
        "loads start before the computation only where the scheduler was promised some",
        Says(_MIXIN, _LIFECYCLE, "start_after_forward = not scheduler_output.has_sync_kv_loads"),
        "connectors that load in start_load_kv",
        since="0.29.0",
        runners=("v1",),
    ),
    Fact(
        "stats have data, and metrics are made of vLLM's own kinds",
        All(
            (
                Has(_METRICS, "KVConnectorStats.data"),
                Takes(
                    _METRICS,
                    "KVConnectorPromMetrics.__init__",
                    ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
                ),
                *(
                    Says(_METRICS, "KVConnectorPromMetrics.__init__", f"metric_types[{kind}]")
                    for kind in ("Counter", "Gauge", "Histogram")
                ),
            )
        ),
        "kvplug.metrics",
    ),
)

_IDENTITY = (
    Fact(
        "a request has what its keys are made of",
        All(
            tuple(
                Sets(_REQUEST, "Request", name)
                for name in (
                    "request_id",
                    "all_token_ids",
                    "cache_salt",
                    "lora_request",
                    "mm_features",
                    "prompt_embeds",
                    "skip_reading_prefix_cache",
                )
            )
        ),
        "kvplug.identity",
    ),
    Fact("a request may be a session", Sets(_REQUEST, "Request", "resumable"), "kvplug.identity", since="0.15.1"),
    Fact(
        "a multimodal item has a place and an identifier",
        All(
            (
                Has("vllm/multimodal/inputs.py", "MultiModalFeatureSpec.mm_position"),
                Has("vllm/multimodal/inputs.py", "MultiModalFeatureSpec.identifier"),
                Has("vllm/multimodal/inputs.py", "PlaceholderRange.offset"),
                Has("vllm/multimodal/inputs.py", "PlaceholderRange.length"),
            )
        ),
        "kvplug.identity",
    ),
    *fields(
        "vllm/lora/request.py",
        "LoRARequest",
        "kvplug.lora",
        "lora_name: str",
        "lora_int_id: int",
    ),
    Fact(
        "kinds of KV cache have the names that tell what a block holds",
        All(
            tuple(
                Has(_SPECS, name)
                for name in (
                    "FullAttentionSpec",
                    "SlidingWindowSpec",
                    "ChunkedLocalAttentionSpec",
                    "CrossAttentionSpec",
                    "EncoderOnlyAttentionSpec",
                    "MambaSpec",
                    "UniformTypeKVCacheSpecs.kv_cache_specs",
                    "KVCacheSpec.page_size_bytes",
                )
            )
        ),
        "kvplug.kv_groups",
    ),
)

FACTS = _INTERFACE + _CALLS + _IDENTITY
