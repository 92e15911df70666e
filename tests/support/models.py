"""Tiny random-weight models whose greedy output depends on the prompt.

A model with the usual small initialisation repeats one token whatever its KV is: it can't show that wrong KV was
read. So weights here are scaled to keep activations and logits large (see `_scale_weights`).

`model_path` makes the whole set once, in a process of its own (torch stays out of pytest's), and keeps it in
``build/test-models``, keyed by what makes it. All models have a byte-level tokenizer of 256 + 3 tokens.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.quantize import to_awq, to_int8

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_ROOT = Path(__file__).resolve().parents[2]

#: What decides the models' content.
_SOURCES = ("models.py", "quantize.py")

#: Number of token ids that are bytes: prompts take ids in ``range(BYTES)``. Three special tokens follow.
BYTES = 256

_SPECIAL = ["<s>", "</s>", "<pad>"]
_HIDDEN = 128
_HEAD = 32
_KV_HEADS = 2
_LAYERS = 4

_COMMON: dict[str, Any] = {
    "vocab_size": BYTES + len(_SPECIAL),
    "bos_token_id": BYTES,
    "eos_token_id": BYTES + 1,
    "pad_token_id": BYTES + 2,
    "hidden_size": _HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

#: Heads so large, and so little state, that vLLM's blocks of attention hold 128 tokens.
_DELTA_NET: dict[str, Any] = {
    "head_dim": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@functools.cache
def model_path(name: str) -> str:
    """Return the folder of a model, as vLLM takes it, making the set of models first where it is missing.

    Args:
        name: ``llama`` (4 layers, grouped-query attention), ``llama_mha`` and ``llama_mqa`` (2 layers, as many KV heads
            as heads, and one), ``mistral_sliding`` (all layers have a sliding window of 64 tokens), ``gemma3`` (sliding
            and full layers: several KV-cache groups), ``gpt_oss`` (the same, with sinks and experts), ``deepseek``
            (multi-head latent attention), ``qwen3_next`` (recurrent state and full attention; runs in bfloat16 only,
            in blocks of 128 tokens), ``qwen3_5`` (the same with float32 state; needs `support.torchvision`), ``lora1``
            and ``lora2`` (adapters of ``llama``), ``llama_eagle`` (EAGLE head for ``llama``), ``llama_draft`` (its
            first two layers, a draft model that is seldom right), ``llama_noisy`` (one that is right half of the time:
            all layers, a little changed), ``llama_awq`` or ``llama_int8`` (quantised).

    Raises:
        KeyError: no such model.
        subprocess.CalledProcessError: the models could not be made.
    """
    folder = Path(__file__).resolve().parent
    key = hashlib.sha256(b"".join((folder / source).read_bytes() for source in _SOURCES)).hexdigest()[:16]
    target = _ROOT / "build" / "test-models" / key
    if not target.is_dir():
        code = "import sys; sys.path.insert(0, sys.argv[1]); from support import models; models.make_all(sys.argv[2])"
        subprocess.run(
            [sys.executable, "-P", "-c", code, str(folder.parent), str(target)],
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
        )
    path = target / name
    if not path.is_dir():
        raise KeyError(f"no test model is called {name!r}; there are {sorted(p.name for p in target.iterdir())}")
    return str(path)


def make_all(folder: str) -> None:
    """Make the set in a temporary folder and move it to `folder`; who comes second keeps the first one's."""
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        _make_base_models(scratch)
        _make_lora_adapters(scratch, target)
        _make_eagle_head(scratch)
        _make_draft_models(scratch)
        _make_quantized_models(scratch)
        with contextlib.suppress(OSError):  # another process was first
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not target.is_dir():
        raise FileNotFoundError(f"could not move the models to {target}")


def _make_base_models(folder: Path) -> None:
    import torch
    import transformers as hf

    torch.manual_seed(0)  # for the few parameters that keep what transformers drew
    hf.utils.logging.disable_progress_bar()
    _save(folder / "llama", hf.LlamaForCausalLM(hf.LlamaConfig(**_COMMON, num_hidden_layers=_LAYERS)))
    for name, kv_heads in (("llama_mha", 4), ("llama_mqa", 1)):
        config = hf.LlamaConfig(**_COMMON | {"num_key_value_heads": kv_heads}, num_hidden_layers=2)
        _save(folder / name, hf.LlamaForCausalLM(config))
    _save(
        folder / "mistral_sliding",
        hf.MistralForCausalLM(hf.MistralConfig(**_COMMON, num_hidden_layers=2, sliding_window=64)),
    )
    gemma = hf.Gemma3TextConfig(
        **_COMMON | {"tie_word_embeddings": True},
        num_hidden_layers=6,
        query_pre_attn_scalar=_HEAD,
        sliding_window=64,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
    )
    # Gemma multiplies embeddings by sqrt(hidden_size), and its head is the embedding.
    _save(folder / "gemma3", hf.Gemma3ForCausalLM(gemma), embedding_std=0.1)
    deepseek = hf.DeepseekV3Config(
        **{name: value for name, value in _COMMON.items() if name != "head_dim"} | {"num_key_value_heads": 4},
        num_hidden_layers=2,
        first_k_dense_replace=2,  # all of them: no mixture of experts
        kv_lora_rank=512,  # with 64 for positions: the one size of a token's KV that vLLM's CPU kernel takes
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        topk_method="noaux_tc",
    )
    _save(folder / "deepseek", hf.DeepseekV3ForCausalLM(deepseek))
    gpt_oss = hf.GptOssConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    _save(folder / "gpt_oss", hf.GptOssForCausalLM(gpt_oss))
    qwen3_next = hf.Qwen3NextConfig(
        **_COMMON | _DELTA_NET,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    _save(folder / "qwen3_next", hf.Qwen3NextForCausalLM(qwen3_next))
    # Text alone, without experts. The released models, too, ask for float32 state beside a convolution in bfloat16.
    qwen3_5 = hf.Qwen3_5TextConfig(**_COMMON | _DELTA_NET, mamba_ssm_dtype="float32")
    _save(folder / "qwen3_5", hf.Qwen3_5ForCausalLM(qwen3_5))


def _save(folder: Path, model: Any, embedding_std: float = 0.5) -> None:
    _scale_weights(model, embedding_std)
    model.save_pretrained(folder)
    _save_tokenizer(folder)


def _scale_weights(model: torch.nn.Module, embedding_std: float) -> None:
    """Draw all matrices again, large enough that each layer changes its input and logits differ widely."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # drawn at random by transformers; this small, a state forgets little
                weight.fill_(-3.0)
            if weight.ndim < 2:  # norms keep their initial values
                continue
            if "embed" in name:
                std = embedding_std
            elif "lm_head" in name:
                std = 3.0 / math.sqrt(weight.shape[-1])
            else:
                std = 1.6 / math.sqrt(weight.shape[-1])
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)


def _save_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer: one token per byte of UTF-8, ids in the order of the alphabet."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + _SPECIAL
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def _make_lora_adapters(folder: Path, final: Path) -> None:
    import torch
    from safetensors.torch import save_file

    rank = 8
    outputs = {"q_proj": _HIDDEN, "k_proj": _KV_HEADS * _HEAD, "v_proj": _KV_HEADS * _HEAD, "o_proj": _HIDDEN}
    generator = torch.Generator().manual_seed(7)
    for name in ("lora1", "lora2"):
        weights = {}
        for layer in range(_LAYERS):
            for module, size in outputs.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, _HIDDEN, generator=generator) * 0.1
                weights[f"{prefix}.lora_B.weight"] = torch.randn(size, rank, generator=generator) * 0.1
        (folder / name).mkdir()
        save_file(weights, folder / name / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "base_model_name_or_path": str(final / "llama"),
            "target_modules": sorted(outputs),
        }
        (folder / name / "adapter_config.json").write_text(json.dumps(config))


def _make_eagle_head(folder: Path) -> None:
    import torch

    generator = torch.Generator().manual_seed(11)
    weights = {
        name.removeprefix("model."): weight
        for name, weight in _llama_weights(folder).items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name  # EAGLE's first layer has no such norm
    }
    weights["fc.weight"] = torch.randn(_HIDDEN, 2 * _HIDDEN, generator=generator) / 16
    _derive_from_llama(folder, "llama_eagle", weights, num_hidden_layers=1)


def _make_draft_models(folder: Path) -> None:
    import torch

    weights = _llama_weights(folder)
    dropped = ("model.layers.2.", "model.layers.3.")
    first = {name: weight for name, weight in weights.items() if not name.startswith(dropped)}
    _derive_from_llama(folder, "llama_draft", first, num_hidden_layers=2)
    generator = torch.Generator().manual_seed(3)
    noisy = {
        name: weight + 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
        if weight.ndim > 1  # norms stay as they are
    }
    _derive_from_llama(folder, "llama_noisy", weights | noisy)


def _make_quantized_models(folder: Path) -> None:
    for name, quantize in (("llama_awq", to_awq), ("llama_int8", to_int8)):
        weights, changes = quantize(_llama_weights(folder))
        _derive_from_llama(folder, name, weights, **changes)


def _llama_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = load_file(folder / "llama" / "model.safetensors")
    return weights


def _derive_from_llama(folder: Path, name: str, weights: Mapping[str, torch.Tensor], **changes: Any) -> None:
    from safetensors.torch import save_file

    shutil.copytree(folder / "llama", folder / name)
    save_file(dict(weights), folder / name / "model.safetensors", metadata={"format": "pt"})
    config_file = folder / name / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | changes))
