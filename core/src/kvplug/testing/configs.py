"""vLLM's own configuration for a model that doesn't exist."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvplug.errors import ConfigError
from kvplug.testing.model import VOCABULARY

__all__ = ["GroupSpec", "kv_cache_configs", "layer_specs", "make_vllm_config", "rank_config"]

Kind = Literal["full", "sliding", "mla", "mamba"]


@dataclass(frozen=True)
class GroupSpec:
    """Layers that are alike. vLLM makes KV-cache groups of them, as it does for a real model.

    Layers of several kinds become groups with equally many layers each, so 1 full and 2 sliding layers are 3 groups.
    vLLM raises block sizes where pages differ otherwise.

    Attributes:
        kind: "full", "sliding" (window attention), "mla" (one latent vector per token) or "mamba" (one state per
            block).
        layers: How many of them, over all pipeline stages.
        block_size: Tokens per block. For "mamba" in mode "none" it isn't used.
        window: Tokens of the sliding window.
        heads: KV heads, over all tensor-parallel ranks.
        head_size: Elements of a key.
        dtype: Name of a torch type.
        mamba_mode: vLLM's `mamba_cache_mode`: "align", "all" or "none". Equal for all groups.
        state_bytes: Bytes of one state.
    """

    kind: Kind = "full"
    layers: int = 1
    block_size: int = 16
    window: int = 32
    heads: int = 1
    head_size: int = 4
    dtype: str = "float32"
    mamba_mode: Literal["align", "all", "none"] = "align"
    state_bytes: int = 64


@functools.cache
def _model_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="kvplug-testing-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1 << 20,
        "dtype": "float32",
    }
    (Path(folder.name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@functools.cache
def _config_class(v2: bool) -> Any:  # noqa: FBT001 - a key of the cache
    """Make vLLM's configuration class with a runner that is chosen here, not by what is installed."""
    from vllm.config import VllmConfig

    # Pickling finds vLLM's class by these names.
    names = {"__module__": VllmConfig.__module__, "__qualname__": VllmConfig.__qualname__}
    return type("VllmConfig", (VllmConfig,), {"use_v2_model_runner": property(lambda _: v2), **names})


def make_vllm_config(
    groups: Sequence[GroupSpec],
    kv_transfer: dict[str, Any] | None,
    *,
    num_blocks: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    tensor_parallel: int,
    pipeline_parallel: int,
    asynchronous: bool,
    enable_prefix_caching: bool,
    v2: bool,
    num_speculative_tokens: int,
    prefix_match_unit: int | None,
) -> Any:
    """Return vLLM's `VllmConfig`, with nothing of it left to the platform that runs the simulation."""
    from vllm.config import (
        CacheConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    modes = {group.mamba_mode for group in groups if group.kind == "mamba"}
    if len(modes) > 1:
        raise ConfigError(f"mamba groups have one mode, not {sorted(modes)}: give all of them the same")
    attention = min((group.block_size for group in groups if group.kind != "mamba"), default=0)
    for group in groups:
        if group.kind == "mamba" and modes == {"align"} and attention and group.block_size != attention:
            raise ConfigError(f"in mamba_mode 'align' states have the attention layers' block size, {attention}")
    if "none" in modes and enable_prefix_caching:
        raise ConfigError("mamba_mode 'none' has no prefix caching: pass enable_prefix_caching=False")
    model = ModelConfig(
        model=_model_folder().name,
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        dtype="float32",
        enforce_eager=True,
    )
    parallel = ParallelConfig(tensor_parallel_size=tensor_parallel, pipeline_parallel_size=pipeline_parallel)
    speculative = None
    if num_speculative_tokens:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=num_speculative_tokens,
            prompt_lookup_max=2,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=min(group.block_size for group in groups),
            enable_prefix_caching=enable_prefix_caching,
            **({} if prefix_match_unit is None else {"prefix_match_unit": prefix_match_unit}),
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        parallel_config=parallel,
        speculative_config=speculative,
        kv_transfer_config=None if kv_transfer is None else KVTransferConfig(**kv_transfer),
    )
    config.__class__ = _config_class(v2)
    # The platform has its own opinion of these, which the simulated one doesn't share.
    config.scheduler_config.async_scheduling = asynchronous
    config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = max_num_batched_tokens
    cache = config.cache_config
    cache.enable_prefix_caching = enable_prefix_caching
    cache.num_gpu_blocks_override = num_blocks
    cache.kv_cache_layout = "LBHNC"
    if modes:
        cache.mamba_cache_mode = modes.pop()
        cache.mamba_block_size = next(group.block_size for group in groups if group.kind == "mamba")
    return config


def rank_config(config: Any, rank: int) -> Any:
    """Return the configuration as the worker of a rank has it."""
    config = copy.copy(config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.rank = rank
    return config


def layer_specs(groups: Sequence[GroupSpec], config: Any) -> list[dict[str, Any]]:
    """Return each rank's layers by name, with vLLM's specifications of their caches."""
    parallel = config.parallel_config
    tensor_parallel, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    pages = [_attention_spec(group, tensor_parallel) for group in groups if group.kind != "mamba"]
    page = max((spec.page_size_bytes for spec in pages), default=None)
    by_stage: list[dict[str, Any]] = [{} for _ in range(stages)]
    total = sum(group.layers for group in groups)
    index = 0
    for group in groups:
        if group.layers % stages:
            raise ConfigError(f"{group.layers} layers can't be split over {stages} stages: use a multiple")
        if group.kind == "mamba":
            spec = _mamba_spec(group, page, config.model_config.max_model_len)
            attribute = "mixer"
        else:
            spec, attribute = _attention_spec(group, tensor_parallel), "self_attn.attn"
        for layer in range(group.layers):
            name = f"model.layers.{index:0{len(str(total - 1))}d}.{attribute}"
            by_stage[layer * stages // group.layers][name] = spec
            index += 1
    return [dict(specs) for specs in by_stage for _ in range(tensor_parallel)]


def _attention_spec(group: GroupSpec, tensor_parallel: int) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as interface

    common: dict[str, Any] = {
        "block_size": group.block_size,
        "num_kv_heads": max(1, group.heads // tensor_parallel),
        "head_size": group.head_size,
        "dtype": getattr(torch, group.dtype),
    }
    if group.kind == "full":
        return interface.FullAttentionSpec(**common)
    if group.kind == "sliding":
        return interface.SlidingWindowSpec(**common, sliding_window=group.window)
    if group.kind == "mla":
        return interface.MLAAttentionSpec(**{**common, "num_kv_heads": 1})
    raise ConfigError(f"there is no kind {group.kind!r} of layers: use full, sliding, mla or mamba")


def _mamba_spec(group: GroupSpec, page: int | None, max_model_len: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    if page is not None and page < group.state_bytes:
        raise ConfigError(f"a state of {group.state_bytes} bytes is larger than a page of {page}: use larger blocks")
    return MambaSpec(
        block_size=max_model_len if group.mamba_mode == "none" else group.block_size,
        shapes=((group.state_bytes // 4,),),
        dtypes=(torch.float32,),
        page_size_padded=page,
        mamba_cache_mode=group.mamba_mode,
    )


def kv_cache_configs(config: Any, specs: list[dict[str, Any]]) -> tuple[list[Any], Any, int, int]:
    """Let vLLM decide on groups and blocks, as its engine core does.

    Returns:
        Each rank's `KVCacheConfig`, the scheduler's, and the scheduler's and the hashes' block sizes in tokens.
    """
    from vllm.v1.core import kv_cache_utils as utils
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(config)
    cache = config.cache_config
    # Only the number of blocks counts, and that is given.
    try:
        configs = utils.get_kv_cache_configs(config, [dict(spec) for spec in specs], [1 << 40] * len(specs))
    except ValueError as error:
        raise ConfigError(
            f"vLLM doesn't take these layers with {cache.num_gpu_blocks_override} blocks and a max_model_len of "
            f"{config.model_config.max_model_len}, mostly since a request of that length needs more blocks: {error}"
        ) from error
    scheduler = utils.generate_scheduler_kv_cache_config(configs)
    cache.num_gpu_blocks = scheduler.num_blocks
    cache.block_size = min(group.kv_cache_spec.block_size for group in scheduler.kv_cache_groups)
    block_size, hash_block_size = utils.resolve_kv_cache_block_sizes(scheduler, config)
    align = utils.resolve_cache_hit_alignment_tokens(scheduler, config, block_size, hash_block_size)
    for one in (*configs, scheduler):
        one.kv_cache_layout = cache.kv_cache_layout
        one.hash_block_size = hash_block_size
        one.cache_hit_alignment_tokens = align
    return configs, scheduler, block_size, hash_block_size
