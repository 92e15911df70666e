"""Which dimension the KV heads are in the caches that the installed vLLM makes."""

from __future__ import annotations

import json

import pytest
import torch

from kvplug.errors import UnsupportedError
from kvplug.namespace import own_shard, shards_of
from kvplug.paged import PagedCache
from kvplug.paged.facts import PeerFacts
from kvplug.paged.slices import find_heads

interface = pytest.importorskip("vllm.v1.kv_cache_interface")
layouts = pytest.importorskip("vllm.v1.kv_cache_layout")


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_single_head_of_the_installed_vllms_caches_is_found(layout):
    """The dimension of a single head is where it would be if there were several, in every memory layout of vLLM's."""
    names, blocks = ["layer.0", "layer.1"], 12

    def caches(heads):
        spec = interface.FullAttentionSpec(block_size=64, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)
        order = layouts.KVCacheLayout[layout]
        layer_stride, block_stride, *_ = interface.compute_layout_strides(spec, blocks, len(names), order)
        size = spec.page_size_bytes * blocks * len(names)
        placement = interface.KVCacheTensor(size, names, layer_stride, block_stride)
        views = interface.create_kv_cache_views(torch.zeros(size, dtype=torch.int8), spec, blocks, order, placement)
        found = dict(zip(names, views, strict=True))
        return spec, found, PagedCache.from_kv_caches(found, num_blocks=blocks).layers

    sizes = (1, 2, 8, 64)  # 64 heads: as many as tokens, of which the release says which come first
    for heads in sizes:
        spec, tensors, layers = caches(heads)
        for other in sizes:
            _, _, theirs = caches(other)
            for layer, expected in zip(layers, theirs, strict=True):
                assert find_heads(layer, tensors[layer.name], spec, blocks).with_heads(other) == expected


def test_a_real_configuration_says_what_peers_have(tmp_path, monkeypatch):
    """Shares of engines of any size, of one engine's configuration: those that they have by their own."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    # Saves a process, which looks at the model's class.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "load_format": "dummy"}
    vllm_config = EngineArgs(model=str(tmp_path), **arguments).create_engine_config()
    parallel = vllm_config.parallel_config
    spec = interface.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
    group = interface.KVCacheGroupSpec(["layer"], spec)
    caches = interface.KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])
    sizes = [(1, 1), (2, 1), (1, 3), (4, 2)]
    seen = {one: shards_of(vllm_config, *one) for one in sizes}
    for tp, pp in sizes:
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = tp, pp
        for rank in range(tp * pp):
            parallel.rank = rank
            assert own_shard(vllm_config) == seen[tp, pp][rank]
            facts = PeerFacts.of(vllm_config, caches, sizes)
            assert facts.peers == tuple(seen.values())
            assert (facts.doubt, facts.latent, facts.specs) == (None, False, {"layer": spec})
    assert str(seen[1, 3][1]) == "layers2-5.heads0-2.tp0of1.pp1of3"
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_PP_LAYER_PARTITION", "3,4")
        assert shards_of(vllm_config, 1, 2)[1].layers == (3, 7)
        assert shards_of(vllm_config, 2, 1)[1].layers == (0, 7)
        with pytest.raises(UnsupportedError, match="which layers 3 stages have"):
            shards_of(vllm_config, 1, 3)
