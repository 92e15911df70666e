"""Round trips between paged KV caches of every layout and slabs."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from dataclasses import dataclass

import pytest
import torch

from kvplug.errors import UnsupportedError
from kvplug.paged import PagedCache
from kvplug.paged.host import HostCopier
from kvplug.paged.layout import fuse, read_layer
from kvplug.paged.staged import StagedCopier
from kvplug.store import Slab

NUM_BLOCKS, LAYERS = 9, 3


@dataclass
class Case:
    """KV caches as vLLM would register them, and what is known about them from elsewhere."""

    raw: list[torch.Tensor]  # all memory, as bytes
    caches: dict[str, torch.Tensor]
    pages: dict[str, int]
    dim: int = 0
    ratio: int = 1

    def block(self, name, block):
        """Return a view of one block of a layer by torch's own indexing."""
        return self.caches[name].narrow(self.dim, block * self.ratio, self.ratio)


def _named(tensors):
    return {f"model.layers.{i}.self_attn.attn": tensor for i, tensor in enumerate(tensors)}


def _memory(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def _one_storage(dtype, physical, to_views, **kwargs):
    """All layers in one allocation of shape `physical`, as vLLM 0.32 does it."""
    raw = _memory(int(torch.Size(physical).numel()) * dtype.itemsize)
    caches = _named(to_views(raw.view(dtype).view(physical)))
    pages = {name: tensor.numel() * dtype.itemsize // NUM_BLOCKS for name, tensor in caches.items()}
    return Case([raw], caches, pages, **kwargs)


def _own_storage(dtype, physical, to_view, **kwargs):
    """One allocation per layer of shape `physical`, as vLLM did it before."""
    raws = [_memory(int(torch.Size(physical).numel()) * dtype.itemsize) for _ in range(LAYERS)]
    caches = _named([to_view(raw.view(dtype).view(physical)) for raw in raws])
    return Case(raws, caches, dict.fromkeys(caches, raws[0].numel() // NUM_BLOCKS), **kwargs)


def _padded(dtype, shape, page_elements, order=None):
    """Blocks further apart than they are large."""
    raw = _memory(LAYERS * NUM_BLOCKS * page_elements * dtype.itemsize)
    flat = raw.view(dtype)
    strides, step = [0] * len(shape), 1
    for dim in reversed(order or range(len(shape))):
        strides[dim], step = step, step * shape[dim]
    views = [
        flat.as_strided((NUM_BLOCKS, *shape), (page_elements, *strides), i * NUM_BLOCKS * page_elements)
        for i in range(LAYERS)
    ]
    caches = _named(views)
    return Case([raw], caches, dict.fromkeys(caches, page_elements * dtype.itemsize))


def _mla_with_indexer(dtype):
    """A latent cache and a second, smaller cache of bytes per layer."""
    case = _own_storage(dtype, (NUM_BLOCKS, 16, 576), lambda t: t)
    indexer = [_memory(NUM_BLOCKS * 16 * 132) for _ in range(LAYERS)]
    case.raw += indexer
    for i, raw in enumerate(indexer):
        case.caches[f"model.layers.{i}.indexer.k_cache"] = raw.view(NUM_BLOCKS, 16, 132)
    return case


B, L = NUM_BLOCKS, LAYERS
LAYOUTS = {
    # vLLM 0.32: [B, H, N, C] per layer, all layers in one storage, in each of its memory layouts.
    "LBHNC": lambda d: _one_storage(d, (L, B, 2, 16, 24), list),
    "LBNHC": lambda d: _one_storage(d, (L, B, 16, 2, 24), lambda t: list(t.permute(0, 1, 3, 2, 4))),
    "LHBNC": lambda d: _one_storage(d, (L, 2, B, 16, 24), lambda t: list(t.permute(0, 2, 1, 3, 4))),
    "BLHNC": lambda d: _one_storage(d, (B, L, 2, 16, 24), lambda t: list(t.permute(1, 0, 2, 3, 4))),
    "BLNHC": lambda d: _one_storage(d, (B, L, 16, 2, 24), lambda t: list(t.permute(1, 0, 3, 2, 4))),
    "BHLNC": lambda d: _one_storage(d, (B, 2, L, 16, 24), lambda t: list(t.permute(2, 0, 1, 3, 4))),
    # Before: K and V as a dimension, first or second; HND by permuted strides.
    "kv_first_nhd": lambda d: _own_storage(d, (2, B, 16, 2, 12), lambda t: t, dim=1),
    "kv_first_hnd": lambda d: _own_storage(d, (2, B, 2, 16, 12), lambda t: t.permute(0, 1, 3, 2, 4), dim=1),
    "kv_first_blocks_outermost": lambda d: _own_storage(d, (B, 2, 16, 2, 12), lambda t: t.transpose(0, 1), dim=1),
    "kv_second_nhd": lambda d: _own_storage(d, (B, 2, 16, 2, 12), lambda t: t),
    "kv_second_hnd": lambda d: _own_storage(d, (B, 2, 2, 16, 12), lambda t: t.permute(0, 1, 3, 2, 4)),
    "kv_second_permuted_inside": lambda d: _own_storage(d, (B, 2, 2, 12, 16), lambda t: t.permute(0, 1, 4, 2, 3)),
    "mla": lambda d: _own_storage(d, (B, 16, 576), lambda t: t),
    "mla_4d": lambda d: _one_storage(d, (L, B, 1, 16, 576), list),
    "mla_with_indexer": _mla_with_indexer,
    "kernel_blocks": lambda d: _one_storage(d, (L, B * 4, 2, 8, 24), list, ratio=4),
    "kernel_blocks_kv_first": lambda d: _own_storage(d, (2, B * 2, 16, 2, 12), lambda t: t, dim=1, ratio=2),
    "kernel_blocks_hnd": lambda d: _own_storage(d, (B * 3, 2, 2, 8, 12), lambda t: t.permute(0, 1, 3, 2, 4), ratio=3),
    "padded": lambda d: _padded(d, (2, 16, 24), 1000),
    "padded_hnd": lambda d: _padded(d, (16, 2, 24), 1000, order=(1, 0, 2)),
    "padded_state_rows": lambda d: _padded(d, (1, 1, 777), 1024),
    "reversed_layers": lambda d: _one_storage(d, (L, B, 2, 16, 24), lambda t: list(t)[::-1]),
    "uneven_layers": lambda d: _one_storage(d, (8, B, 2, 16, 24), lambda t: [t[0], t[1], t[5], t[6], t[7], t[2]]),
}
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn]


class QuietStream:
    """A stream that orders nothing: on CPUs everything is done in the order in which it's called."""

    def wait_for_compute(self):
        pass

    def hold_compute(self, event):
        pass

    def record(self):
        class Event:
            synchronize = lambda self: None
            query = lambda self: True

        return Event()

    def active(self):
        return contextlib.nullcontext()

    def indices(self, numbers):
        return torch.tensor(numbers)


def _host(case):
    return PagedCache.from_kv_caches(case.caches, num_blocks=NUM_BLOCKS, page_size_bytes=case.pages)


def _by_numpy(case):
    layers, regions = zip(
        *(read_layer(name, t, NUM_BLOCKS, case.pages.get(name)) for name, t in case.caches.items()), strict=True
    )
    fused = fuse(regions)
    return PagedCache(layers, fused, HostCopier(fused, None))


def _staged(case):
    layers, regions = zip(
        *(read_layer(name, t, NUM_BLOCKS, case.pages.get(name)) for name, t in case.caches.items()), strict=True
    )
    fused = fuse(regions)
    staging_bytes = 3 * sum(region.nbytes for region in fused) + 1000
    return PagedCache(layers, fused, StagedCopier(fused, torch.device("cpu"), QuietStream(), staging_bytes))


@pytest.fixture(params=[_host, _by_numpy, _staged], ids=["host", "numpy", "staged"])
def make(request):
    return request.param


def _bytes(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_e1_e2_e3_blocks_of_every_layout_come_back(make, layout, dtype):
    """Blocks that went to the slab and came back into other blocks are equal there, and not one other byte changed."""
    torch.manual_seed(0)
    rng = random.Random(layout)
    case = LAYOUTS[layout](dtype)
    paged = make(case)
    assert paged.block_bytes == sum(_bytes(case.block(name, 1)).numel() for name in case.caches)
    slab = Slab(12, paged.block_bytes)
    sources = rng.sample(range(1, NUM_BLOCKS), 5)
    slots = rng.sample(range(12), 5)
    before = [raw.clone() for raw in case.raw]
    paged.gather(sources, slab, slots).wait()
    assert all(torch.equal(raw, old) for raw, old in zip(case.raw, before, strict=True))
    # Each slot has the bytes of its block and no others.
    for block, slot in zip(sources, slots, strict=True):
        expected = torch.cat([_bytes(case.block(name, block)) for name in case.caches])
        assert torch.equal(torch.from_numpy(slab.view(slot)).sort().values, expected.sort().values)

    targets = rng.sample(range(1, NUM_BLOCKS), 5)
    originals = {(name, b): case.block(name, b).clone() for name in case.caches for b in sources}
    paged.scatter(slab, slots, targets).wait()
    after = [raw.clone() for raw in case.raw]
    # The same done by torch's own indexing, on the memory of before.
    for raw, old in zip(case.raw, before, strict=True):
        raw.copy_(old)
    for (name, source), original in originals.items():
        case.block(name, targets[sources.index(source)]).copy_(original)
    assert all(torch.equal(raw, new) for raw, new in zip(case.raw, after, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_swapped_block_is_noticed(make, layout):
    """Negative control: with two slots swapped, the comparison of the round trip fails."""
    torch.manual_seed(0)
    case = LAYOUTS[layout](torch.bfloat16)
    paged = make(case)
    slab = Slab(2, paged.block_bytes)
    before = [raw.clone() for raw in case.raw]
    paged.gather([3, 5], slab, [0, 1]).wait()
    paged.scatter(slab, [0, 1], [3, 5]).wait()
    assert all(torch.equal(raw, old) for raw, old in zip(case.raw, before, strict=True))
    paged.scatter(slab, [1, 0], [3, 5]).wait()
    assert not any(torch.equal(_bytes(case.block(name, 3)), _bytes(case.block(name, 5))) for name in case.caches)
    assert not all(torch.equal(raw, old) for raw, old in zip(case.raw, before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ways_of_copying_fill_slots_alike(layout):
    """What one way of copying stored, the other can load: slots have the same bytes."""
    case = LAYOUTS[layout](torch.bfloat16)
    slabs = []
    for paged in (_host(case), _by_numpy(case), _staged(case)):
        slabs.append(Slab(4, paged.block_bytes))
        paged.gather([8, 1, 4], slabs[-1], [0, 3, 2]).wait()
    for slot in (0, 2, 3):
        assert all((slab.view(slot) == slabs[0].view(slot)).all() for slab in slabs)


def test_equal_layouts_have_equal_slots():
    """Caches with the same layout text can load each other's slots, however blocks are placed and padded."""
    groups = {}
    for name, make_case in LAYOUTS.items():
        groups.setdefault(_host(make_case(torch.bfloat16)).layout, []).append(name)
    assert ["LBHNC", "LHBNC", "BLHNC", "BHLNC", "padded", "reversed_layers"] in groups.values()
    assert ["kv_first_nhd", "kv_first_blocks_outermost", "kv_second_nhd"] in groups.values()

    one, other = LAYOUTS["BHLNC"](torch.bfloat16), LAYOUTS["padded"](torch.bfloat16)
    slab = Slab(1, _host(one).block_bytes)
    _host(one).gather([3], slab, [0])
    _host(other).scatter(slab, [0], [7])
    for name in one.caches:
        assert torch.equal(_bytes(one.block(name, 3)), _bytes(other.block(name, 7)))


def test_e3_the_layout_tells_types_apart():
    """A layout names dtype, shape and memory order, and says whether the layers are the same."""
    layouts = {_host(LAYOUTS["LBHNC"](dtype)).layout for dtype in DTYPES}
    assert len(layouts) == len(DTYPES)
    case = LAYOUTS["LBNHC"](torch.uint8)
    layout = _host(case).layout
    assert layout.startswith("3 layers (names ")
    assert layout.endswith("): 3 x uint8[2, 16, 24] in memory order [1, 0, 2]")
    case.caches = {name + ".other": tensor for name, tensor in case.caches.items()}
    assert _host(case).layout != layout


def test_layers_that_share_a_kv_cache_are_stored_once():
    """Cross-layer sharing costs nothing: the shared cache is stored with its first layer."""
    case = LAYOUTS["LBHNC"](torch.bfloat16)
    alone = _host(case)
    first = next(iter(case.caches))
    case.caches["model.layers.3.self_attn.attn"] = case.caches[first]
    shared = _host(case)
    assert shared.block_bytes == alone.block_bytes
    assert shared.layout == alone.layout
    assert [layer.name for layer in shared.layers] == [layer.name for layer in alone.layers]


@pytest.mark.parametrize(
    ("block_ids", "slots", "message"),
    [
        ([1, 0], [0, 1], "null block"),
        ([1, -1], [0, 1], "null block"),
        ([1, NUM_BLOCKS], [0, 1], "null block"),
        ([1, 2], [0, 2], "slots must be in"),
        ([1, 2], [-1, 0], "slots must be in"),
        ([1, 2], [0], "2 blocks but 1 slots"),
    ],
)
def test_what_is_out_of_range_is_refused_before_anything_is_copied(make, block_ids, slots, message):
    """The null block, ids and slots out of range, and lists of different lengths are errors; nothing was copied."""
    case = LAYOUTS["LBHNC"](torch.bfloat16)
    paged = make(case)
    slab = Slab(2, paged.block_bytes)
    before = case.raw[0].clone()
    with pytest.raises(ValueError, match=message):
        paged.gather(block_ids, slab, slots)
    with pytest.raises(ValueError, match=message):
        paged.scatter(slab, slots, block_ids)
    assert not slab.rows.any()
    assert torch.equal(case.raw[0], before)


def test_one_target_for_two_is_refused():
    """Two blocks can't go to one slot, nor two slots to one block; one source may go to two targets."""
    case = LAYOUTS["LBHNC"](torch.bfloat16)
    paged = _host(case)
    slab = Slab(2, paged.block_bytes)
    with pytest.raises(ValueError, match="a slot that is written comes twice"):
        paged.gather([1, 2], slab, [0, 0])
    with pytest.raises(ValueError, match="a block that is written comes twice"):
        paged.scatter(slab, [0, 1], [1, 1])
    paged.gather([1, 1], slab, [0, 1])
    paged.scatter(slab, [0, 0], [2, 3])
    assert all(torch.equal(_bytes(case.block(name, 2)), _bytes(case.block(name, 3))) for name in case.caches)


def test_a_slab_with_small_slots_is_refused():
    """A block must fit into a slot."""
    paged = _host(LAYOUTS["LBHNC"](torch.bfloat16))
    with pytest.raises(ValueError, match=f"a block has {paged.block_bytes} bytes"):
        paged.gather([1], Slab(1, paged.block_bytes - 1), [0])


def test_nothing_to_copy_is_fine(make):
    """Empty lists copy nothing."""
    paged = make(LAYOUTS["LBHNC"](torch.bfloat16))
    slab = Slab(1, paged.block_bytes)
    assert paged.gather([], slab, []).done()
    assert paged.scatter(slab, [], []).done()


def test_no_layers_or_other_devices_are_refused():
    """A cache without layers or blocks is an error; so is one on a device that kvplug can't copy from."""
    with pytest.raises(ValueError, match="got 0 layers"):
        PagedCache.from_kv_caches({}, num_blocks=3)
    with pytest.raises(ValueError, match="0 blocks"):
        PagedCache.from_kv_caches({"a": torch.zeros(3, 2)}, num_blocks=0)
    with pytest.raises(UnsupportedError, match="not on meta"):
        PagedCache.from_kv_caches({"a": torch.zeros(3, 2, device="meta")}, num_blocks=3)


@pytest.mark.parametrize("kind", ["one storage", "several"])
def test_copies_allocate_nothing(kind):
    """Copying on CPUs makes no buffers: less is allocated at any time than one layer of one block has bytes."""
    tensors = torch.zeros(LAYERS, 2, NUM_BLOCKS, 2, 128, 256).unbind(0)
    if kind == "several":
        tensors = [tensor.clone() for tensor in tensors]
    paged = PagedCache.from_kv_caches(_named(tensors), num_blocks=NUM_BLOCKS)
    slab = Slab(8, paged.block_bytes)
    tracemalloc.start()
    paged.gather(range(1, 9), slab, range(8))
    paged.scatter(slab, range(8), range(1, 9))
    most = tracemalloc.get_traced_memory()[1]
    assert most < paged.block_bytes // LAYERS // 8
    slab.view(0).copy()  # negative control: numpy's buffers are seen
    assert tracemalloc.get_traced_memory()[1] >= paged.block_bytes
    tracemalloc.stop()
