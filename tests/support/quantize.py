"""Quantises a checkpoint's linear layers in formats that vLLM reads: AWQ, and int8 as compressed-tensors has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

#: Inputs that share a scale in AWQ.
_GROUP = 32

#: AWQ packs eight outputs into an int32; the output at each place, from the lowest four bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def to_awq(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Quantise to 4 bits with a zero point and a scale for each 32 inputs of an output.

    Args:
        weights: A Llama checkpoint.

    Returns:
        The checkpoint, and what its configuration has more.
    """
    quantized = {}
    for name, weight in weights.items():
        if not _is_linear(name):
            quantized[name] = weight.half()
            continue
        groups = weight.t().float().reshape(-1, _GROUP, weight.shape[0])  # [groups, inputs, outputs]
        low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        values = (groups / scales.float().unsqueeze(1) + zeros.unsqueeze(1)).round().clamp(0, 15)
        layer = name.removesuffix("weight")
        quantized[f"{layer}qweight"] = _pack_awq(values.flatten(0, 1))
        quantized[f"{layer}qzeros"] = _pack_awq(zeros)
        quantized[f"{layer}scales"] = scales.contiguous()
    method = {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"}
    return quantized, {"quantization_config": method, "dtype": "float16"}


def _pack_awq(values: torch.Tensor) -> torch.Tensor:
    import torch

    places = values.to(torch.int64).view(len(values), -1, 8)[:, :, _AWQ_ORDER]
    packed = (places << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def to_int8(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Quantise to 8 bits with a scale per output; activations are quantised, too, token by token as they come.

    Args:
        weights: A Llama checkpoint.

    Returns:
        The checkpoint, and what its configuration has more.
    """
    import torch

    quantized = {}
    for name, weight in weights.items():
        if not _is_linear(name):
            quantized[name] = weight
            continue
        scale = weight.abs().amax(1, keepdim=True).float() / 127
        quantized[name] = (weight / scale).round().to(torch.int8)
        quantized[f"{name}_scale"] = scale
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": "channel", "dynamic": False},
        "input_activations": common | {"strategy": "token", "dynamic": True},
    }
    method = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return quantized, {"quantization_config": method}


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")
