"""Finding the blocks: what is sure, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvplug.errors import UnsupportedError
from kvplug.paged import PagedCache
from kvplug.paged.layout import fuse, read_layer


def _read(tensor, num_blocks, page_size=None):
    return read_layer("model.layers.0.self_attn.attn", tensor, num_blocks, page_size)


def _stride(tensor, num_blocks, page_size=None):
    return _read(tensor, num_blocks, page_size)[1].block_stride


@pytest.mark.parametrize(
    ("shape", "num_blocks", "block_shape"),
    [
        ((64, 2, 64, 128), 64, (2, 64, 128)),
        ((16, 16, 16, 16), 16, (16, 16, 16)),
        ((2, 8, 16, 8, 8), 8, (2, 16, 8, 8)),
        ((2, 40, 16, 8, 8), 10, (4, 2, 16, 8, 8)),
        ((40, 2, 16, 8, 8), 10, (4, 2, 16, 8, 8)),
        ((128, 1, 128, 576), 128, (1, 128, 576)),
        ((2, 3, 16, 8), 2, (3, 16, 8)),
    ],
)
def test_e1_dimensions_that_are_equal_by_chance_do_not_matter(shape, num_blocks, block_shape):
    """Blocks come first, or second behind K and V: another dimension as long as the block dimension is no obstacle."""
    assert _read(torch.zeros(shape), num_blocks)[0].shape == block_shape


def test_e1_two_blocks_behind_k_and_v_are_decided_by_strides():
    """`[2, 2, ...]` is decided if the strides show that blocks are outermost in memory, or padded."""
    blocks_outermost = torch.zeros(2, 2, 16, 8, 4).transpose(0, 1)
    assert _stride(blocks_outermost, 2) == 2 * 16 * 8 * 4 * 4
    padded = torch.zeros(5000).as_strided((2, 2, 16, 8, 4), (2000, 512, 32, 4, 1))
    assert _stride(padded, 2, page_size=8000) == 8000


@pytest.mark.parametrize(
    ("shape", "num_blocks", "reason"),
    [
        ((2, 2, 16, 8, 4), 2, "both of the first two dimensions"),
        ((2, 4, 16, 8, 4), 2, "both of the first two dimensions"),
        ((2, 7, 16, 8, 4), 1, "both of the first two dimensions"),
        ((20, 2, 10, 64), 10, "both dimension 0 and dimension 2"),
        ((8, 100, 16, 64), 100, "neither of the first two dimensions"),
        ((3, 100, 16, 64), 100, "neither of the first two dimensions"),
        ((101, 2, 16, 64), 100, "neither of the first two dimensions"),
        ((50, 2, 16, 64), 100, "neither of the first two dimensions"),
        ((100,), 100, "it isn't made of blocks"),
        ((100, 0), 100, "it isn't made of blocks"),
    ],
)
def test_e1_unknown_layouts_are_refused_with_what_to_report(shape, num_blocks, reason):
    """What isn't sure is refused, with layer, shape, strides, dtype and number of blocks in the message."""
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError) as error:
        PagedCache.from_kv_caches({"model.layers.0.self_attn.attn": tensor}, num_blocks=num_blocks)
    message = str(error.value)
    for part in (
        "'model.layers.0.self_attn.attn'",
        reason,
        f"shape {list(shape)}, strides {list(tensor.stride())}, torch.bfloat16, {num_blocks} blocks",
        "report this line",
    ):
        assert part in message


@pytest.mark.parametrize("page_size", [1024, 1 << 20])
def test_e1_a_page_size_that_does_not_fit_is_refused(page_size):
    """Blocks of another size than the KV-cache spec says are refused, unless they are that far apart."""
    tensor = torch.zeros(10, 2, 16, 8)
    assert _stride(tensor, 10, page_size=2 * 16 * 8 * 4) == 1024
    with pytest.raises(UnsupportedError, match=f"1024 bytes, 1024 apart, but its spec says {page_size * 2} bytes"):
        _read(tensor, 10, page_size=page_size * 2)
    with pytest.raises(UnsupportedError, match="spec says 512 bytes"):
        _read(tensor, 10, page_size=512)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 16, 8).expand(10, 16, 8),
        torch.zeros(1000).as_strided((10, 16, 8), (64, 8, 1)),
        torch.zeros(10, 1, 8).expand(10, 16, 8),
    ],
    ids=["blocks", "partly", "inside"],
)
def test_elements_that_overlap_are_refused(tensor):
    """If bytes belong to two elements, writing one block could change another."""
    with pytest.raises(UnsupportedError, match="overlap in memory"):
        _read(tensor, 10)


@pytest.mark.parametrize("state", [[torch.zeros(10, 4)], (torch.zeros(10, 4), torch.zeros(10, 2)), None])
def test_lists_of_state_tensors_are_refused(state):
    """Recurrent state that is kept in several tensors is refused by name."""
    with pytest.raises(UnsupportedError, match=r"layer 'mamba' is a \w+, not one tensor .* without the connector"):
        PagedCache.from_kv_caches({"attention": torch.zeros(10, 2, 16, 8), "mamba": state}, num_blocks=10)


def _regions(tensors, num_blocks=10):
    return [_read(tensor, num_blocks)[1] for tensor in tensors]


def test_pieces_that_are_neighbours_on_both_sides_are_one():
    """Contiguous dimensions are one run; layers that follow each other in a block are one run too."""
    (one,) = _regions([torch.zeros(10, 2, 16, 8)])
    assert (one.sizes, one.run) == ((), 1024)
    (kv_first,) = _regions([torch.zeros(2, 10, 16, 8)])
    assert (kv_first.sizes, kv_first.run) == ((2,), 512)
    (packed,) = fuse(_regions(torch.zeros(10, 3, 2, 16, 8).unbind(1)))
    assert (packed.sizes, packed.run, packed.block_stride) == ((), 3072, 3072)


def test_layers_of_one_storage_are_one_region():
    """Layers that are evenly spaced in one storage are copied together; others one by one, in their order."""
    (even,) = fuse(_regions(torch.zeros(3, 10, 2, 16, 8).unbind(0)))
    assert (even.sizes, even.strides, even.run) == ((3,), (10240,), 1024)
    storage = torch.zeros(8, 10, 2, 16, 8)
    regions = fuse(_regions([storage[i] for i in (0, 1, 5, 4, 6)]))
    assert [(region.sizes, region.slot_offset) for region in regions] == [((2,), 0), ((), 2048), ((2,), 3072)]
    separate = fuse(_regions([torch.zeros(10, 2, 16, 8), torch.zeros(10, 2, 16, 8)]))
    assert [region.slot_offset for region in separate] == [0, 1024]


def test_order_ignores_dimensions_of_size_one():
    """A dimension of size 1 has no order, whatever its stride: the layout's text doesn't depend on it."""
    plain = torch.zeros(10, 1, 16, 8)
    odd = torch.zeros(10 * 16 * 8).as_strided((10, 1, 16, 8), (128, 7777, 8, 1))
    assert _read(plain, 10)[0].layout == _read(odd, 10)[0].layout == "float32[1, 16, 8] in memory order [1, 2]"
