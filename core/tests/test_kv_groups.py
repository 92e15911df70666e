"""Which of vLLM's KV-cache groups a connector of blocks can serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvplug.errors import UnsupportedError
from kvplug.kv_groups import alignment_of, kv_groups


def config(*specs, layers=("a", "b")):
    groups = [SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(num_blocks=9, kv_cache_groups=groups)


def attention(name, **fields):
    from vllm.v1 import kv_cache_interface

    arguments = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32, **fields}
    return getattr(kv_cache_interface, name)(**arguments)


def test_layers_of_different_sizes_in_one_group():
    """A group may hold layers whose pages differ: each has its own size."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    small, large = attention("FullAttentionSpec"), attention("FullAttentionSpec", head_size=16)
    spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": small, "b": large})
    (group,) = kv_groups(config(spec), "X")
    assert group.page_size_bytes == {
        "a": small.page_size_bytes,
        "b": large.page_size_bytes,
    }


def mamba(mode="align", **fields):
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode=mode, **fields)


def mla():
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


def sliding(window=32, **fields):
    return attention("SlidingWindowSpec", sliding_window=window, **fields)


@pytest.mark.parametrize(
    ("make", "kind", "window", "every_block"),
    [
        (lambda: attention("FullAttentionSpec"), "full", 0, False),
        (mla, "full", 0, False),
        (sliding, "window", 32, False),
        (lambda: sliding(extra_retained_tokens=3), "window", 35, False),
        (lambda: attention("ChunkedLocalAttentionSpec", attention_chunk_size=48), "chunk", 48, False),
        (mamba, "state", 0, False),
        (lambda: mamba("all"), "state", 0, True),
    ],
)
def test_kinds_of_groups(make, kind, window, every_block):
    """What a group is, and what it keeps, is told by the class of its spec."""
    spec = make()
    (group,) = kv_groups(config(spec), "X")
    assert (group.index, group.kind, group.block_size) == (0, kind, 16)
    assert (group.window, group.every_block) == (window, every_block)
    assert group.page_size_bytes == {"a": spec.page_size_bytes, "b": spec.page_size_bytes}


@pytest.mark.parametrize("make", [sliding, lambda: attention("ChunkedLocalAttentionSpec", attention_chunk_size=48)])
@pytest.mark.parametrize("block_size", [16, 32])
def test_blocks_that_arent_needed_are_vllms_null_blocks(make, block_size):
    """Windows and chunks: for every length, the first block that is needed is the first that vLLM keeps."""
    import dataclasses

    from vllm.v1.core import single_type_kv_cache_manager as managers

    spec = dataclasses.replace(make(), block_size=block_size)
    (group,) = kv_groups(config(spec), "X")
    manager = object.__new__(getattr(managers, type(spec).__name__.replace("Spec", "Manager")))
    for name in ("sliding_window", "attention_chunk_size", "extra_retained_tokens"):
        if hasattr(spec, name):
            setattr(manager, name, getattr(spec, name))
    for tokens in range(300):
        assert group.first_needed(tokens) == max(0, manager.get_num_skipped_tokens(tokens)) // block_size


def test_state_needs_the_last_block():
    """Of state vLLM keeps the block that holds it after the last token."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    (group,) = kv_groups(config(mamba()), "X")
    manager = object.__new__(MambaManager)
    for tokens in range(1, 100):
        assert group.first_needed(tokens) == manager.get_num_skipped_tokens(tokens) // 16
    assert group.first_needed(32) == 1


def test_full_attention_needs_all():
    """Every block, of any length."""
    (group,) = kv_groups(config(attention("FullAttentionSpec")), "X")
    assert {group.first_needed(tokens) for tokens in range(100)} == {0}


def test_hits_end_where_blocks_of_all_groups_end():
    """The least common multiple of their block sizes."""
    sizes = kv_groups(
        config(attention("FullAttentionSpec"), sliding(block_size=48), attention("FullAttentionSpec", block_size=32)),
        "X",
    )
    assert [group.index for group in sizes] == [0, 1, 2]
    assert alignment_of(sizes) == 96
    assert alignment_of(sizes[:1]) == 16


@pytest.mark.parametrize("name", ["CrossAttentionSpec", "EncoderOnlyAttentionSpec"])
def test_what_depends_on_more_than_tokens_is_refused(name):
    """Named by layer and class, wherever among the groups it is."""
    with pytest.raises(UnsupportedError, match=rf"X can't store the cache of layer a \({name}\)"):
        kv_groups(config(attention("FullAttentionSpec"), attention(name)), "X")


def test_a_kind_that_isnt_known_is_refused():
    """A subclass of full attention may keep other blocks than all, so only known ones count."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    class Novel(FullAttentionSpec):
        pass

    spec = Novel(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="Novel"):
        kv_groups(config(spec), "X")


def test_unlike_layers_in_one_group_are_refused():
    """Where one layer of a group needs other blocks than another, no answer fits both."""
    group = SimpleNamespace(
        layer_names=["a", "b"],
        kv_cache_spec=SimpleNamespace(
            block_size=16, kv_cache_specs={"a": attention("FullAttentionSpec"), "b": sliding()}
        ),
    )
    with pytest.raises(UnsupportedError, match=r"unlike layers \(a, b\)"):
        kv_groups(SimpleNamespace(num_blocks=9, kv_cache_groups=[group]), "X")


def test_one_representative_for_all_layers_of_a_group():
    """In the scheduler, vLLM has one layer's spec for all; page sizes are that one's."""
    spec = attention("FullAttentionSpec")
    group = SimpleNamespace(
        layer_names=["a", "b"], kv_cache_spec=SimpleNamespace(block_size=16, kv_cache_specs={"a": spec, "b": spec})
    )
    (found,) = kv_groups(SimpleNamespace(num_blocks=9, kv_cache_groups=[group]), "X")
    assert list(found.page_size_bytes) == ["a", "b"]
