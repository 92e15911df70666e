"""Blocks of several KV-cache groups in slots of one size, and parts of a cache for single layers."""

from __future__ import annotations

import pytest
import torch

from kvplug.kv_groups import KVGroup
from kvplug.paged import PagedCache
from kvplug.paged.groups import PagedGroups
from kvplug.store import Slab

BLOCKS = 9


def group(index, pages, *, kind="full"):
    return KVGroup(index, kind, 16, 32 if kind == "window" else 0, False, pages)


def state(width, padded, blocks=BLOCKS):
    """Rows of recurrent state as vLLM registers them: bytes, further apart than they are long."""
    raw = torch.randint(0, 127, (blocks * padded,), dtype=torch.int8)
    return raw, raw.as_strided((blocks, 1, 1, width), (padded, width, width, 1))


@pytest.fixture
def hybrid():
    """Attention of two groups, one with half the heads, and a group of state rows with paddings."""
    torch.manual_seed(0)
    raw, rows = state(777, 1024)
    caches = {
        "full.0": torch.randn(BLOCKS, 2, 16, 2, 8),
        "window.0": torch.randn(BLOCKS, 2, 16, 1, 8),
        "full.1": torch.randn(BLOCKS, 2, 16, 2, 8),
        "state.0": rows,
    }
    groups = (
        group(0, {"full.0": 2048, "full.1": 2048}),
        group(1, {"window.0": 1024}, kind="window"),
        group(2, {"state.0": 1024}, kind="state"),
    )
    return PagedGroups.from_kv_caches(caches, groups, num_blocks=BLOCKS), caches, raw


def test_a_slot_is_as_large_as_the_largest_block(hybrid):
    """Groups' caches come in the order of the groups, and the layout tells all of them."""
    paged, _, _ = hybrid
    assert [cache.block_bytes for cache in paged.caches] == [4096, 1024, 777]
    assert paged.slot_bytes == 4096
    assert paged.layout == " | ".join(cache.layout for cache in paged.caches)


def test_e2_blocks_of_every_group_come_back(hybrid):
    """Each group's blocks come back through slots of one size; other groups' layers, and paddings, aren't touched."""
    paged, caches, raw = hybrid
    slab = Slab(4, paged.slot_bytes)
    for number, (cache, names) in enumerate(
        zip(paged.caches, (["full.0", "full.1"], ["window.0"], ["state.0"]), strict=True)
    ):
        before = {name: tensor.clone() for name, tensor in caches.items()}
        padding = raw.view(BLOCKS, 1024)[:, 777:].clone()
        cache.gather([3, 5], slab, [number, 3]).wait()
        cache.scatter(slab, [number, 3], [7, 2]).wait()
        for name, tensor in caches.items():
            expected = before[name].clone()
            if name in names:
                expected[7], expected[2] = before[name][3], before[name][5]
            assert torch.equal(tensor, expected), name
        assert torch.equal(raw.view(BLOCKS, 1024)[:, 777:], padding)


def test_one_groups_slots_are_those_of_its_cache():
    """With one group nothing is different from a cache without groups, layers that the spec doesn't name included."""
    caches = {"a": torch.randn(BLOCKS, 2, 16, 1, 8), "b": torch.randn(BLOCKS, 2, 16, 1, 8)}
    paged = PagedGroups.from_kv_caches(caches, (group(0, {"a": 1024}),), num_blocks=BLOCKS)
    alone = PagedCache.from_kv_caches(caches, num_blocks=BLOCKS)
    assert (paged.layout, paged.slot_bytes) == (alone.layout, alone.block_bytes)


def test_a_layer_that_shares_a_cache_is_left_out():
    """It is in no group, and its blocks are another layer's."""
    caches = {"a": torch.randn(BLOCKS, 2, 16, 1, 8), "b": torch.randn(BLOCKS, 2, 16, 1, 8)}
    caches["shares a"] = caches["a"]
    groups = (group(0, {"a": 1024}), group(1, {"b": 1024}))
    paged = PagedGroups.from_kv_caches(caches, groups, num_blocks=BLOCKS)
    assert [[layer.name for layer in cache.layers] for cache in paged.caches] == [["a"], ["b"]]


def test_a_group_without_layers_is_an_error():
    """Nothing could be stored of it, and hits would be wrong."""
    with pytest.raises(ValueError, match="0 layers"):
        PagedGroups.from_kv_caches(
            {"a": torch.randn(BLOCKS, 2, 16, 1, 8)},
            (group(0, {"a": 1024}), group(1, {"b": 1024})),
            num_blocks=BLOCKS,
        )


# -- Single layers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def layers():
    caches = {f"layer.{n}": torch.randn(BLOCKS, 2, 16, 1, 8) for n in range(3)}
    return PagedCache.from_kv_caches(caches, num_blocks=BLOCKS), caches


def test_layer_by_layer_fills_slots_as_a_whole_copy_does(layers):
    """What was saved layer by layer is loaded whole, and the other way round."""
    whole, caches = layers
    slab = Slab(2, whole.block_bytes)
    whole.gather([3], slab, [0]).wait()
    for name in caches:
        whole.of_layers([name]).gather([3], slab, [1]).wait()
    assert (slab.view(0) == slab.view(1)).all()
    expected = {name: tensor[3].clone() for name, tensor in caches.items()}
    for name in reversed(list(caches)):
        whole.of_layers([name]).scatter(slab, [0], [6]).wait()
    assert all(torch.equal(caches[name][6], expected[name]) for name in caches)


@pytest.mark.parametrize("names", [["layer.0"], ["layer.1"], ["layer.2"], ["layer.0", "layer.1"]])
def test_a_part_touches_its_own_bytes_only(layers, names):
    """Neither the slot's other bytes, nor other layers' blocks."""
    whole, caches = layers
    part = whole.of_layers(names)
    slab = Slab(2, whole.block_bytes)
    slab.view(0)[:] = 0xAB
    part.gather([3], slab, [0]).wait()
    by_layer = slab.view(0).reshape(3, -1)
    for number, name in enumerate(caches):
        assert (by_layer[number] == 0xAB).all() == (name not in names)
    before = {name: tensor.clone() for name, tensor in caches.items()}
    part.scatter(slab, [0], [6]).wait()
    for name, tensor in caches.items():
        expected = before[name].clone()
        if name in names:
            expected[6] = before[name][3]
        assert torch.equal(tensor, expected)


def test_a_part_of_nothing_is_an_error(layers):
    """A layer that isn't stored has no part."""
    with pytest.raises(ValueError, match=r"none of draft.0 is stored here"):
        layers[0].of_layers(["draft.0"])
