"""The caches that the installed vLLM makes, in each of its memory layouts."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kvplug.paged import PagedCache
from kvplug.store import Slab

interface = pytest.importorskip("vllm.v1.kv_cache_interface")
layouts = pytest.importorskip("vllm.v1.kv_cache_layout")
NUM_BLOCKS, NAMES = 12, ["layer.0", "layer.1", "layer.2"]


def _spec(kind):
    if kind == "mla":
        return interface.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    spec = interface.FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    if kind == "padded":
        spec = dataclasses.replace(spec, page_size_padded=spec.page_size_bytes + 4096)
    return spec


def _views(spec, layout, kernel_block_size):
    layer_stride, block_stride, *_ = interface.compute_layout_strides(spec, NUM_BLOCKS, len(NAMES), layout)
    size = spec.page_size_bytes * NUM_BLOCKS * len(NAMES)
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    placement = interface.KVCacheTensor(size, NAMES, layer_stride, block_stride)
    return interface.create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, placement, kernel_block_size)


# What vLLM itself refuses to lay out: padding or kernel blocks inside other dimensions.
@pytest.mark.parametrize(
    ("kind", "kernel_block_size", "names"),
    [
        ("full", None, ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]),
        ("mla", None, ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]),
        ("padded", None, ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]),
        ("full", 32, ["LBHNC", "LBNHC"]),
        ("mla", 16, ["LBHNC", "LBNHC", "LHBNC"]),
    ],
)
def test_e1_e2_caches_of_the_installed_vllm_come_back(kind, kernel_block_size, names):
    """Blocks are copied to other blocks exactly, and no other block changes, in every layout that vLLM has."""
    ratio = 64 // (kernel_block_size or 64)
    rng = random.Random(kind)
    for name in names:
        spec = _spec(kind)
        views = _views(spec, layouts.KVCacheLayout[name], kernel_block_size)
        caches = dict(zip(NAMES, views, strict=True))
        pages = dict.fromkeys(NAMES, spec.page_size_bytes)
        paged = PagedCache.from_kv_caches(caches, num_blocks=NUM_BLOCKS, page_size_bytes=pages)
        slab = Slab(5, paged.block_bytes)
        expected = [view.clone() for view in views]
        sources, targets = (rng.sample(range(1, NUM_BLOCKS), 5) for _ in range(2))
        for old, new in zip(views, expected, strict=True):
            for source, target in zip(sources, targets, strict=True):
                new[target * ratio : (target + 1) * ratio] = old[source * ratio : (source + 1) * ratio]
        paged.gather(sources, slab, range(5))
        paged.scatter(slab, range(5), targets)
        for view, new in zip(views, expected, strict=True):
            assert torch.equal(view.contiguous().view(torch.uint8), new.contiguous().view(torch.uint8)), name
