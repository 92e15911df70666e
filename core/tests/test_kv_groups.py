"""Which of vLLM's KV-cache groups a connector of blocks can serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvplug.errors import UnsupportedError
from kvplug.kv_groups import single_attention_group


def config(*specs, layers=("a", "b")):
    groups = [SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(num_blocks=9, kv_cache_groups=groups)


def attention(name, **fields):
    from vllm.v1 import kv_cache_interface

    arguments = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32, **fields}
    return getattr(kv_cache_interface, name)(**arguments)


def test_a_full_attention_group():
    """One group of attention layers gives block size, page sizes and the number of blocks."""
    spec = attention("FullAttentionSpec")
    group = single_attention_group(config(spec), "X")
    assert (group.num_blocks, group.block_size, group.windowed) == (9, 16, False)
    assert group.page_size_bytes == {"a": spec.page_size_bytes, "b": spec.page_size_bytes}


@pytest.mark.parametrize(
    ("name", "fields"),
    [("SlidingWindowSpec", {"sliding_window": 32}), ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 32})],
)
def test_groups_that_free_blocks_early(name, fields):
    """Windows are told, since their blocks change hands while a request runs."""
    assert single_attention_group(config(attention(name, **fields)), "X").windowed


def test_layers_of_different_sizes_in_one_group():
    """A group may hold layers whose pages differ: each has its own size."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    small, large = attention("FullAttentionSpec"), attention("FullAttentionSpec", head_size=16)
    spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": small, "b": large})
    assert single_attention_group(config(spec), "X").page_size_bytes == {
        "a": small.page_size_bytes,
        "b": large.page_size_bytes,
    }


def test_a3_several_groups_are_refused():
    """Models with several groups are refused at start, not in the middle of serving."""
    with pytest.raises(UnsupportedError, match=r"X supports models with one KV-cache group so far, and this one has 2"):
        single_attention_group(config(attention("FullAttentionSpec"), attention("FullAttentionSpec")), "X")
    with pytest.raises(UnsupportedError, match="has 0"):
        single_attention_group(config(), "X")


def test_e5_recurrent_state_is_refused():
    """A prefix of KV without the recurrent state that goes with it would be wrong: Mamba layers are refused."""
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(UnsupportedError, match=r"layer a \(MambaSpec\)"):
        single_attention_group(config(spec), "X")


def test_cross_attention_is_refused():
    """Its KV depends on the encoder's input, which no block key covers."""
    with pytest.raises(UnsupportedError, match="CrossAttentionSpec"):
        single_attention_group(config(attention("CrossAttentionSpec")), "X")
