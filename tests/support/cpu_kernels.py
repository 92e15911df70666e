"""Stand-ins, in torch, for two kernels that vLLM's CPU build has on AVX-512 only: fp8 KV caches and AWQ weights.

A connector sees the same caches, bytes and configuration with them as with the real ones. They are slow, know just what
the test models need, and are used only where the real ones are missing: see `install_missing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def install_missing() -> None:
    """Let engines of this process have fp8 KV caches and AWQ weights, whatever its CPU is."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        _install_fp8_caches()
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        _install_int4_products()


def _install_fp8_caches() -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    get_isa = cpu_attn._get_attn_isa

    def get_attn_isa(dtype: Any, block_size: int, head_size: int | None = None, kv_cache_dtype: Any = None) -> str:
        """Leave out the refusal of fp8."""
        isa: str = get_isa(dtype, block_size, head_size)
        return isa

    cpu_attn._get_attn_isa = get_attn_isa
    for name, stand_in in (
        ("cpu_attn_get_scheduler_metadata", _no_metadata),
        ("cpu_attn_reshape_and_cache", _write_fp8),
        ("cpu_attention_with_kv_cache", _attend_to_fp8),
    ):
        setattr(ops, name, _for_fp8(stand_in, getattr(ops, name)))


def _for_fp8(stand_in: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, kv_cache_dtype: str = "auto", **kwargs: Any) -> Any:
        if not kv_cache_dtype.startswith("fp8"):
            return real(*args, kv_cache_dtype=kv_cache_dtype, **kwargs)
        return stand_in(*args, kv_cache_dtype=kv_cache_dtype, **kwargs)

    return call


def _no_metadata(**_arguments: Any) -> torch.Tensor:
    """Return the plan of work over threads, of which `_attend_to_fp8` needs none."""
    import torch

    return torch.empty(0)


def _float8(kv_cache_dtype: str) -> torch.dtype:
    import torch

    return torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn


def _write_fp8(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    _isa: str,
    *,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
) -> None:
    """Write tokens' K and V, ``[tokens, heads, head size]``, into caches ``[blocks, heads, block size, head size]``."""
    import torch

    dtype = _float8(kv_cache_dtype)
    largest = torch.finfo(dtype).max
    valid = slot_mapping >= 0
    slots = slot_mapping[valid]
    block_size = key_cache.shape[2]
    for new, scale, cache in ((key, k_scale, key_cache), (value, v_scale, value_cache)):
        scaled = (new[: len(slot_mapping)][valid].float() / scale).clamp(-largest, largest)
        cache[slots // block_size, :, slots % block_size] = scaled.to(dtype).view(torch.uint8)


def _attend_to_fp8(
    *,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    block_table: torch.Tensor,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
    **others: Any,
) -> None:
    """Compute causal attention of tokens ``[tokens, heads, head size]`` over the cache, one token at a time.

    So the result for a token doesn't depend on what else is in the step.
    """
    assert causal
    assert others["alibi_slopes"] is None
    assert others["s_aux"] is None
    assert others["sliding_window"] == -1
    assert others["softcap"] == 0
    dtype = _float8(kv_cache_dtype)
    group = query.shape[1] // key_cache.shape[1]
    starts = query_start_loc.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        first, stop = starts[request], starts[request + 1]
        blocks = block_table[request, : -(-length // key_cache.shape[2])].long()
        keys, values = (
            # [heads, tokens, head size], each head as often as it has queries
            (cache[blocks].view(dtype).float() * factor).transpose(0, 1).flatten(1, 2).repeat_interleave(group, dim=0)
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )
        for token in range(first, stop):
            seen = length - (stop - 1 - token)
            scores = (keys[:, :seen] @ query[token].float().unsqueeze(-1)).squeeze(-1) * scale
            weighted = scores.softmax(-1).unsqueeze(1) @ values[:, :seen]
            output[token] = weighted.reshape(output[token].shape).to(output.dtype)


def _install_int4_products() -> None:
    from vllm import _custom_ops as ops

    ops.cpu_gemm_wna16 = _multiply_int4


def _multiply_int4(
    *,
    input: torch.Tensor,  # noqa: A002 - vLLM's name
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """Multiply with 4-bit weights, packed for the real kernel: 16 outputs a row, 8 of them in each int32."""
    import torch

    del isa_hint
    groups, outputs = scales.shape
    inputs = q_weight.shape[1] * pack_factor // 16
    shifts = torch.arange(0, 32, 32 // pack_factor)
    quantized = (q_weight.view(outputs // 16, inputs, 16 // pack_factor, 1) >> shifts) & 15
    weight = quantized.flatten(2).transpose(0, 1).reshape(groups, inputs // groups, outputs).float()
    offset = 8.0 if zeros is None else (((zeros.unsqueeze(-1) >> shifts) & 15).reshape(groups, 1, outputs).float())
    weight = ((weight - offset) * scales.float().unsqueeze(1)).view(inputs, outputs)
    product = input.float() @ weight
    return (product if bias is None else product + bias.float()).to(input.dtype)
