"""The models of the engine measurements: Llamas with random weights, made once and kept."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.processes import ROOT

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MUCH_COMPUTE", "MUCH_KV", "VOCABULARY", "Shape", "model_path"]

VOCABULARY = 4096


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `dtype` is that of its weights and KV as vLLM runs it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    dtype: str
    head: int = 64


#: 34 million weights, which take a CPU core seconds for a long prompt; 20 KiB of KV per token.
MUCH_COMPUTE = Shape(hidden=512, intermediate=1408, layers=10, heads=8, kv_heads=4, dtype="float32")

#: Little to compute and 40 KiB of KV per token, in the type that most models are served in.
MUCH_KV = Shape(hidden=256, intermediate=256, layers=20, heads=8, kv_heads=8, dtype="bfloat16")


def model_path(shape: Shape) -> Path:
    """Return a model's folder, as vLLM takes it. It has no tokenizer."""
    key = hashlib.sha256(Path(__file__).read_bytes() + repr(shape).encode()).hexdigest()[:16]
    target = ROOT / "build" / "bench-type1" / f"model-{key}"
    if target.is_dir():
        return target
    from safetensors.numpy import save_file

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".model-", dir=target.parent))
    try:
        save_file(dict(_weights(shape)), scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(_config(shape)), encoding="utf-8")
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": shape.dtype,
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _weights(shape: Shape) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield tensors by name, so large that the output depends on the whole prompt."""
    import numpy as np

    generator = np.random.default_rng(0)

    def matrix(rows: int, columns: int, gain: float = 1.6) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = generator.standard_normal((rows, columns), dtype=np.float32)
        values *= gain / math.sqrt(columns)
        return values

    hidden, intermediate = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    norm = np.ones(hidden, dtype=np.float32)
    yield "model.embed_tokens.weight", matrix(VOCABULARY, hidden, math.sqrt(hidden))
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm
        yield f"{prefix}.self_attn.q_proj.weight", matrix(queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", norm
        yield f"{prefix}.mlp.gate_proj.weight", matrix(intermediate, hidden)
        yield f"{prefix}.mlp.up_proj.weight", matrix(intermediate, hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, intermediate)
    yield "model.norm.weight", norm
    yield "lm_head.weight", matrix(VOCABULARY, hidden, 0.25)
