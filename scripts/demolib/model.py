"""The demo's model: a small Llama with random weights, and a tokenizer trained on the demo's text.

A model with the usual initialisation repeats one token whatever its KV is, and couldn't show that wrong KV was read. So
the weights here are drawn larger: each layer changes its input, and the output depends on all of the prompt.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demolib.text import corpus

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

__all__ = ["PARAMETERS", "make_model"]

_VOCABULARY = 4096
_HIDDEN = 512
_INTERMEDIATE = 1408
_LAYERS = 8
_HEADS = 8
_KV_HEADS = 2
_HEAD = _HIDDEN // _HEADS

# Standard deviations: of what a layer makes of its input, of embeddings, of logits. With these, one other token among
# 1,500 changes log-probabilities by several 1e-3, and another cut of the prompt into chunks, which rounds differently,
# by about 1e-6.
_GAIN = 1.6
_EMBEDDING_STD = 1.0
_LOGITS_STD = 0.25

_ROLES = ("system", "user", "assistant")
_END = "<|end|>"
_SPECIAL = (_END, *(f"<|{role}|>" for role in _ROLES))

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

#: Parameters of the model.
PARAMETERS = 2 * _VOCABULARY * _HIDDEN + _HIDDEN * (
    1 + _LAYERS * (2 + 2 * _HIDDEN + 2 * _KV_HEADS * _HEAD + 3 * _INTERMEDIATE)
)


def make_model(folder: Path, seed: int) -> Path:
    """Return the folder of the model, as vLLM takes it. Makes it first where it is missing, in some seconds.

    Args:
        folder: Where models are kept, each in a folder that is named after what it was made from.
        seed: Seed of the weights.

    """
    text = corpus()
    made_from = hashlib.sha256("\0".join([Path(__file__).read_text(encoding="utf-8"), str(seed), *text]).encode())
    target = folder / f"model-{made_from.hexdigest()[:16]}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".model-", dir=folder))
    try:
        tokenizer = _train_tokenizer(text)
        _save_tokenizer(scratch, tokenizer)
        _save_weights(scratch, seed)
        _write_json(scratch / "config.json", _config(tokenizer.token_to_id(_END)))
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _train_tokenizer(text: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def _save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "pad_token": _END,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _save_weights(folder: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    save_file(dict(_weights(seed)), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(seed: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the tensors, with the names that Transformers gives them."""
    import numpy as np

    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = generator.standard_normal((rows, columns), dtype=np.float32)
        values *= gain / math.sqrt(columns)
        return values

    def norm() -> np.ndarray[Any, Any]:
        return np.ones(_HIDDEN, dtype=np.float32)

    yield "model.embed_tokens.weight", matrix(_VOCABULARY, _HIDDEN, _EMBEDDING_STD * math.sqrt(_HIDDEN))
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", norm()
        yield prefix + "self_attn.q_proj.weight", matrix(_HIDDEN, _HIDDEN, _GAIN)
        yield prefix + "self_attn.k_proj.weight", matrix(_KV_HEADS * _HEAD, _HIDDEN, _GAIN)
        yield prefix + "self_attn.v_proj.weight", matrix(_KV_HEADS * _HEAD, _HIDDEN, _GAIN)
        yield prefix + "self_attn.o_proj.weight", matrix(_HIDDEN, _HIDDEN, _GAIN)
        yield prefix + "post_attention_layernorm.weight", norm()
        yield prefix + "mlp.gate_proj.weight", matrix(_INTERMEDIATE, _HIDDEN, _GAIN)
        yield prefix + "mlp.up_proj.weight", matrix(_INTERMEDIATE, _HIDDEN, _GAIN)
        yield prefix + "mlp.down_proj.weight", matrix(_HIDDEN, _INTERMEDIATE, _GAIN)
    yield "model.norm.weight", norm()
    yield "lm_head.weight", matrix(_VOCABULARY, _HIDDEN, _LOGITS_STD)


def _config(end_token: int | None) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "pad_token_id": end_token,
    }


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")
