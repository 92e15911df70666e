"""What a model and its KV cache are, as a fingerprint that keeps their blocks apart from all others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvplug.canonical import canonical_json, plain
from kvplug.digest import tagged_digest
from kvplug.errors import UnsupportedError
from kvplug.weights import describe_weights

__all__ = [
    "FORMAT_VERSION",
    "Shard",
    "has_draft_kv",
    "namespace_fields",
    "namespace_fingerprint",
    "own_shard",
    "shard_id",
    "shards_of",
]

#: Raised whenever keys, or what they stand for, change: content of an older version is then never found.
FORMAT_VERSION = 1

#: Entries of a Hugging Face configuration that say where it came from or how it's run, not what the model computes.
_NOT_IN_CONFIG = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_auto_class",
        "_commit_hash",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_is_quantized",
        "_name_or_path",
        "auto_map",
        "name_or_path",
        "transformers_version",
    }
)

#: Attributes of a KV-cache spec that say what is in a block and are equal on every rank. Counts of heads and sizes of
#: pages and states aren't: they are a rank's share.
_SPEC_FIELDS = (
    "attention_chunk_size",
    "block_size",
    "cache_dtype_str",
    "cache_role",
    "compress_ratio",
    "dtype",
    "dtypes",
    "head_size",
    "head_size_v",
    "kv_quant_mode",
    "mamba_type",
    "model_version",
    "rswa_window",
    "sink_len",
    "sliding_window",
    "tokens_per_state",
)

#: Options that change what an image, a video or a sound is to the model, though not its hash if the client named it.
_MULTIMODAL_FIELDS = (
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)

#: Ways of speculative decoding that keep no KV of their own.
_WITHOUT_DRAFT_KV = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})


def namespace_fingerprint(vllm_config: Any, kv_cache_config: Any, *, model_id: str | None = None) -> bytes:
    """Return the digest that seeds all block keys of a model and its KV cache, 32 bytes.

    It is equal in every process, whatever `PYTHONHASHSEED` is, on every rank, for every parallel size, and for the same
    weights under another path. Where in the model a rank's share lies is in `shard_id` instead.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`, or None before there is one. Call it on the scheduler's side, where
            keys are made.
        model_id: A name that stands for the weights instead of their content (`namespace_fields`).

    Raises:
        ConfigError: The weights, or something in the model's configuration, can't be identified.
        UnsupportedError: The KV of this model isn't decided by the tokens before it.

    """
    fields = namespace_fields(vllm_config, kv_cache_config, model_id=model_id)
    return tagged_digest("kvplug.namespace", canonical_json(fields))


def namespace_fields(vllm_config: Any, kv_cache_config: Any, *, model_id: str | None = None) -> dict[str, Any]:
    """Return what goes into the fingerprint, as a dict for JSON.

    LoRA adapters aren't in it: they belong to requests. Nor is anything that can differ between engines that may share
    KV: parallel sizes and ranks, paths, names under which the model is served.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`, or None.
        model_id: Stands for name, revision and content of the weights. Whoever sets it promises that equal names mean
            equal weights.

    Raises:
        ConfigError: As `namespace_fingerprint`.
        UnsupportedError: As `namespace_fingerprint`.

    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    specs = _specs(kv_cache_config)
    _refuse_what_tokens_dont_decide(model, kv_cache_config)
    if model_id is None:
        weights = describe_weights(model, vllm_config.load_config)
    else:
        weights = {"kind": "model_id", "model_id": model_id}
    return {
        "format": FORMAT_VERSION,
        "weights": weights,
        "model": _model_fields(model),
        "draft": _draft_fields(vllm_config),
        "geometry": {
            "layers": model.get_total_num_hidden_layers(),
            "kv_heads": model.get_total_num_kv_heads(),
            "head_size": model.get_head_size(),
        },
        "cache": {
            "dtype": str(cache.cache_dtype),
            # The worker's configuration may still have another block size than the caches.
            "block_size": [spec["block_size"] for spec in specs] if specs else cache.block_size,
            "specs": specs,
            "layout": _layout(cache, kv_cache_config),
            "attention_backend": _attention_backend(vllm_config),
            # Measured while the first prompts run, so equal prompts can have unequal KV in two processes.
            "scales_measured": bool(getattr(cache, "calculate_kv_scales", False)),
            "unquantized_layers": plain(getattr(cache, "kv_cache_dtype_skip_layers", None) or []),
            "mamba_dtypes": [getattr(cache, n, "auto") for n in ("mamba_cache_dtype", "mamba_ssm_cache_dtype")],
        },
        "multimodal": _multimodal_fields(model),
        "lora": _lora_fields(vllm_config, model),
    }


@dataclass(frozen=True)
class Shard:
    """The share of every block that one rank holds. As text, it is part of stored keys.

    Attributes:
        layers: Half-open range of the model's layers.
        heads: Half-open range of its KV heads. Ranks that hold replicas of the same heads have the same range.
        tp: Rank and size of tensor parallelism.
        pp: Rank and size of pipeline parallelism.
        pcp: Rank and size of prefill context parallelism.
        dcp: Rank and size of decode context parallelism.

    """

    layers: tuple[int, int]
    heads: tuple[int, int]
    tp: tuple[int, int]
    pp: tuple[int, int]
    pcp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)

    def __str__(self) -> str:
        shard = "layers{}-{}.heads{}-{}.tp{}of{}.pp{}of{}".format(*self.layers, *self.heads, *self.tp, *self.pp)
        if self.pcp[1] > 1 or self.dcp[1] > 1:
            shard += ".pcp{}of{}.dcp{}of{}".format(*self.pcp, *self.dcp)
        return shard


def shard_id(vllm_config: Any) -> str:
    """Name the share of every block that this rank holds, as part of a stored key.

    Args:
        vllm_config: vLLM's `VllmConfig` in a worker, where `parallel_config.rank` is the worker's.

    Returns:
        Layers and KV heads as half-open ranges, then tensor and pipeline parallelism as rank and size, for example
        `layers0-32.heads4-8.tp1of2.pp0of1`. Context parallelism is added where there is any. Ranks that hold replicas
        of the same heads have the same ranges.

    """
    return str(own_shard(vllm_config))


def own_shard(vllm_config: Any) -> Shard:
    """Return the share of every block that this rank holds.

    Args:
        vllm_config: As for `shard_id`.

    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    dcp_size = getattr(parallel, "decode_context_parallel_size", 1)
    # The order of ranks, the last counting fastest: data, pipeline, prefill context, tensor.
    tp_rank = parallel.rank % tp_size
    return Shard(
        layers=model.get_layers_start_end_indices(parallel),
        heads=_heads(model, tp_rank, tp_size),
        tp=(tp_rank, tp_size),
        pp=(parallel.rank // (tp_size * pcp_size) % pp_size, pp_size),
        pcp=(parallel.rank // tp_size % pcp_size, pcp_size),
        dcp=(tp_rank % dcp_size, dcp_size),
    )


def shards_of(vllm_config: Any, tp_size: int, pp_size: int) -> tuple[Shard, ...]:
    """Return the shares of all ranks of an engine that serves this model with other parallel sizes, in their order.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        tp_size: That engine's tensor-parallel size.
        pp_size: Its pipeline-parallel size.

    Raises:
        UnsupportedError: There can't be such an engine, or it isn't known which layers its ranks have.

    """
    model = vllm_config.model_config
    heads = _num_heads(model)
    if tp_size < 1 or pp_size < 1 or (heads % tp_size and tp_size % heads):
        raise UnsupportedError(f"{heads} KV heads can't be spread over {tp_size} ranks")
    shards = []
    for pp_rank in range(pp_size):
        # As `get_layers_start_end_indices` sees it in that engine's first rank of the stage.
        parallel = SimpleNamespace(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size, rank=pp_rank * tp_size)
        try:
            # One stage has all layers, whatever VLLM_PP_LAYER_PARTITION says of this engine's.
            layers = (
                model.get_layers_start_end_indices(parallel)
                if pp_size > 1
                else (0, model.get_total_num_hidden_layers())
            )
        except ValueError as error:  # VLLM_PP_LAYER_PARTITION is for another number of stages
            raise UnsupportedError(f"vLLM can't tell which layers {pp_size} stages have ({error})") from error
        shards += [
            Shard(layers, _heads(model, tp_rank, tp_size), (tp_rank, tp_size), (pp_rank, pp_size))
            for tp_rank in range(tp_size)
        ]
    return tuple(shards)


def _num_heads(model: Any) -> int:
    return 1 if getattr(model, "use_mla", False) else int(model.get_total_num_kv_heads())


def _heads(model: Any, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return the range of KV heads that a tensor-parallel rank has."""
    heads = _num_heads(model)
    share = max(1, heads // tp_size)
    first = tp_rank * share if heads >= tp_size else tp_rank * heads // tp_size
    return first, first + share


def _refuse_what_tokens_dont_decide(model: Any, kv_cache_config: Any) -> None:
    if getattr(model, "is_encoder_decoder", False):
        raise UnsupportedError(
            "The decoder's KV of an encoder-decoder model depends on the encoder's whole input, which block keys don't "
            "cover; run this model without a kvplug connector."
        )
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    if any(getattr(_representative(group.kv_cache_spec), "non_causal", False) for group in groups):
        raise UnsupportedError(
            "This model's attention looks ahead, so the KV of a token depends on later tokens, which block keys don't "
            "cover; run this model without a kvplug connector."
        )


def _model_fields(model: Any) -> dict[str, Any]:
    config = plain(model.hf_config, without=_NOT_IN_CONFIG, name="hf_config")
    fields = {
        "dtype": plain(model.dtype),
        "quantization": model.quantization,
        "quantization_config": plain(getattr(model, "quantization_config", None), name="quantization_config"),
        "model_impl": plain(getattr(model, "model_impl", "auto")),
        "model_class_overrides": plain(getattr(model, "model_class_overrides", None) or {}),
        # Names code on the Hub, where that is allowed to run.
        "code_revision": plain(model.code_revision) if getattr(model, "trust_remote_code", False) else None,
        # Includes what `hf_overrides` changed, as a dict or a function.
        "config": config,
    }
    if _has_long_rope(config):
        # vLLM chooses between short and long factors by the longest sequence that it's set up for.
        fields["max_model_len"] = model.max_model_len
    return fields


def _has_long_rope(config: Any) -> bool:
    if isinstance(config, dict):
        kinds = (config.get("rope_type"), config.get("type"))
        return "longrope" in kinds or "su" in kinds or any(_has_long_rope(value) for value in config.values())
    return isinstance(config, list) and any(_has_long_rope(value) for value in config)


def has_draft_kv(vllm_config: Any) -> bool:
    """Say whether there is a draft model whose layers have KV in the same blocks.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    """
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and speculative.method not in _WITHOUT_DRAFT_KV


def _draft_fields(vllm_config: Any) -> dict[str, Any] | None:
    """Describe a draft model whose layers have KV in the same blocks."""
    if not has_draft_kv(vllm_config):
        return None
    speculative = vllm_config.speculative_config
    fields: dict[str, Any] = {"method": plain(speculative.method)}
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        fields["weights"] = describe_weights(draft, load_config)
        fields["model"] = _model_fields(draft)
        fields["dtype"] = plain(getattr(speculative, "kv_cache_dtype", None))
    return fields


def _representative(spec: Any) -> Any:
    """Return a group's spec, or its first layer's where its layers differ in size: what vLLM's scheduler sees."""
    layers = getattr(spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else spec


def _specs(kv_cache_config: Any) -> list[dict[str, Any]]:
    specs = []
    for group in getattr(kv_cache_config, "kv_cache_groups", ()):
        spec = _representative(group.kv_cache_spec)
        values = {name: plain(getattr(spec, name, None), name=name) for name in _SPEC_FIELDS}
        specs.append({"kind": type(spec).__name__} | {name: v for name, v in values.items() if v is not None})
    return specs


def _layout(cache: Any, kv_cache_config: Any) -> str | None:
    """Return vLLM's name for the order of a cache's dimensions (NHD, HND, LBNHC…), where it's known.

    In recent releases, the engine core decides it. Before, an attention backend does, in the worker, unless the
    environment does.
    """
    for owner in (kv_cache_config, cache):
        layout = getattr(owner, "kv_cache_layout", None)
        if layout is not None:
            return str(layout)
    return os.environ.get("VLLM_KV_CACHE_LAYOUT") or None


def _attention_backend(vllm_config: Any) -> Any:
    attention = getattr(vllm_config, "attention_config", None)
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    return {"default": plain(getattr(attention, "backend", None)), "per_kind": plain(per_kind)}


def _multimodal_fields(model: Any) -> dict[str, Any]:
    config = getattr(model, "multimodal_config", None)
    values = {name: plain(getattr(config, name, None), name=name) for name in _MULTIMODAL_FIELDS}
    # An option that a release doesn't have is like one that isn't set.
    return {name: value for name, value in values.items() if value not in (None, {})}


def _lora_fields(vllm_config: Any, model: Any) -> dict[str, Any]:
    """Describe settings that change what any adapter computes, if they aren't the usual ones."""
    lora = getattr(vllm_config, "lora_config", None)
    fields = {}
    if (modules := getattr(lora, "target_modules", None)) is not None:
        fields["target_modules"] = sorted(modules)
    dtype = plain(getattr(lora, "lora_dtype", None))
    if dtype not in (None, "auto", plain(model.dtype)):
        fields["dtype"] = dtype
    return fields
