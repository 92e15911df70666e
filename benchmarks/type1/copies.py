"""Copies between paged cache and slab, over memcpy of the same bytes."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.common.figures import Figure
from benchmarks.common.timing import alternately

if TYPE_CHECKING:
    import torch

    from kvplug.paged import PagedCache
    from kvplug.store import Slab

__all__ = ["measure"]

_LAYERS = 24
_PIECES = tuple(kib << 10 for kib in (32, 64, 128, 256, 512))

#: Bytes of a pass: so many that libc's memcpy goes around the caches, which makes it half as fast again. Twice as many
#: are in the paged cache, of which every other block, in random order, is copied.
_PASS = 288 << 20

_PAGE = 4096


def measure(repeats: int) -> list[Figure]:
    """Measure all sizes of pieces in both layouts and both directions."""
    import torch

    torch.set_num_threads(1)
    # Used from the middle of a page on: where source and target have nearly the same place in a page, libc's memcpy may
    # be several times slower.
    plain = torch.ones(_PASS + _PAGE, dtype=torch.uint8)
    ratios: dict[str, float] = {}
    by_numpy: dict[str, float] = {}
    speeds = []
    for layout, memory in _memories().items():
        for piece in _PIECES:
            speed = _speeds(_caches(memory, piece), plain.data_ptr() + _PAGE // 2, repeats)
            for way in ("out", "in"):
                case = f"{layout}, {piece >> 10} KB, {way}"
                ratios[case] = speed[way] / speed[f"memcpy {way}"]
                by_numpy[case] = speed[f"{way} by numpy"] / speed[f"memcpy {way}"]
                speeds.append(speed[f"memcpy {way}"])
    return [
        _lowest("copy_vs_memcpy", ratios, repeats, at_least=0.8),
        _lowest("copy_vs_memcpy_numpy", by_numpy, repeats),
        Figure("memcpy_gb_per_s", max(speeds) / 1e9, "GB/s", detail=f"highest; lowest: {min(speeds) / 1e9:.1f}"),
    ]


def _lowest(name: str, ratios: dict[str, float], repeats: int, at_least: float | None = None) -> Figure:
    case = min(ratios, key=ratios.__getitem__)
    ordered = sorted(ratios.values())
    detail = (
        f"lowest of {len(ratios)} cases ({case}); median {ordered[len(ordered) // 2]:.2f}, highest {ordered[-1]:.2f}; "
        f"bests of {repeats} alternating runs"
    )
    return Figure(name, ratios[case], at_least=at_least, detail=detail)


def _memories() -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """Allocate the paged caches' memory as vLLM does: in one piece since 0.32, one per layer before."""
    import torch

    layer = 2 * _PASS // _LAYERS + 2 * _PIECES[-1]
    return {
        "one storage": torch.zeros(_LAYERS * layer, dtype=torch.uint8),
        "layer by layer": [torch.zeros(layer, dtype=torch.uint8) for _ in range(_LAYERS)],
    }


def _caches(memory: torch.Tensor | list[torch.Tensor], piece: int) -> dict[str, torch.Tensor]:
    """Lay caches out in the memory.

    In one storage K and V of a block are one piece, layer by layer they are two.
    """
    if isinstance(memory, list):
        num_blocks = _PASS // (_LAYERS * piece) + 1
        tensors = [layer[: 2 * num_blocks * piece].view(2, num_blocks, piece) for layer in memory]
    else:
        num_blocks = 2 * _PASS // (_LAYERS * piece) + 1
        tensors = list(memory[: _LAYERS * num_blocks * piece].view(_LAYERS, num_blocks, piece))
    return {f"layers.{number}": tensor for number, tensor in enumerate(tensors)}


def _speeds(caches: dict[str, torch.Tensor], plain: int, repeats: int) -> dict[str, float]:
    """Return bytes per second of each way, at best."""
    from kvplug.paged import PagedCache
    from kvplug.paged.streaming import streaming_copy
    from kvplug.store import Slab

    first = caches["layers.0"]
    num_blocks = first.shape[0] if first.ndim == 2 else first.shape[1]
    if streaming_copy() is None:
        raise AssertionError("llvmlite is missing, which comes with vLLM")
    paged = PagedCache.from_kv_caches(caches, num_blocks=num_blocks)
    slab = Slab(_PASS // paged.block_bytes, paged.block_bytes)
    slab.rows[:] = 1  # pages are there before the first run
    if slab.slot_stride != paged.block_bytes or slab.num_slots * paged.block_bytes != _PASS:
        raise AssertionError("memcpy would copy more bytes, or fewer")
    blocks = list(range(1, num_blocks))
    random.Random(0).shuffle(blocks)  # noqa: S311
    del blocks[slab.num_slots :]
    rows = slab.address(0)
    copies = _both_ways(paged, slab, blocks)
    by_numpy = _both_ways(_copying_by_numpy(caches, num_blocks), slab, blocks)
    times = alternately(
        [
            lambda: ctypes.memmove(rows, plain, _PASS),
            copies["out"],
            lambda: ctypes.memmove(plain, rows, _PASS),
            copies["in"],
        ],
        repeats,
    )
    # These have no limit to meet, so a few runs do.
    times += alternately([by_numpy["out"], by_numpy["in"]], -(-repeats // 4))
    names = ("memcpy out", "out", "memcpy in", "in", "out by numpy", "in by numpy")
    return {name: _PASS / min(seconds) for name, seconds in zip(names, times, strict=True)}


def _both_ways(paged: PagedCache, slab: Slab, blocks: list[int]) -> dict[str, Callable[[], Any]]:
    slots = list(range(len(blocks)))
    return {"out": lambda: paged.gather(blocks, slab, slots), "in": lambda: paged.scatter(slab, slots, blocks)}


def _copying_by_numpy(caches: dict[str, torch.Tensor], num_blocks: int) -> PagedCache:
    """Return the paged cache as it is where there is no llvmlite."""
    from kvplug.paged import PagedCache
    from kvplug.paged.host import HostCopier
    from kvplug.paged.layout import fuse, read_layer

    layers, regions = zip(*(read_layer(name, tensor, num_blocks) for name, tensor in caches.items()), strict=True)
    fused = fuse(regions)
    return PagedCache(layers, fused, HostCopier(fused, None))
