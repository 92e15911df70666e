"""Where the blocks of a paged KV cache are: from a tensor's shape and strides to addresses.

vLLM's attention backends put the block dimension first, or second behind a dimension of size 2 that separates K from
V. This holds for all releases from 0.14 to 0.33. In memory the dimensions may come in any order (NHD, HND, blocks
or layers outermost), blocks may be padded, and each may be split into several kernel blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from kvplug.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Layer", "Region", "fuse", "read_layer"]


@dataclass(frozen=True)
class Layer:
    """One layer's part of every block.

    Attributes:
        name: The layer's name in vLLM.
        dtype: The tensor's dtype, without `torch.`.
        shape: Shape of one block, in elements, in the tensor's own order of dimensions. Has the number of kernel blocks
            in front, where the tensor is in kernel blocks.
        order: The dimensions of `shape`, outermost in memory first; those of size 1 are left out.
        nbytes: Bytes of one block of this layer.

    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    nbytes: int

    @property
    def layout(self) -> str:
        """Type and geometry of one block, as text. Equal text means equal order of bytes."""
        return f"{self.dtype}{list(self.shape)} in memory order {list(self.order)}"


@dataclass(frozen=True)
class Region:
    """The same bytes of every block: an array `[num_blocks, *sizes, run]` of bytes somewhere in memory.

    A slot holds the same bytes as a C-contiguous array `[*sizes, run]` at `slot_offset`.

    Attributes:
        storage: The memory.
        offset: Byte of block 0's first byte in `storage`.
        num_blocks: Number of blocks.
        block_stride: Bytes from one block to the next.
        sizes: How many runs of contiguous bytes, along each dimension, outermost first. Empty: just one.
        strides: Bytes from one run to the next, along each dimension.
        run: Length in bytes of a run.
        slot_offset: Byte in a slot at which the region starts.

    """

    storage: torch.UntypedStorage
    offset: int
    num_blocks: int
    block_stride: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    run: int
    slot_offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return prod(self.sizes) * self.run


def read_layer(name: str, tensor: object, num_blocks: int, page_size: int | None = None) -> tuple[Layer, Region]:
    """Find out where a layer's blocks are.

    Args:
        name: The layer's name, for errors.
        tensor: What vLLM registers for it.
        num_blocks: Number of blocks in vLLM's block tables, the null block included.
        page_size: Bytes of one block of the layer by vLLM's KV-cache spec, paddings included; checked if known.

    Raises:
        UnsupportedError: The blocks can't be found for sure.

    """
    if not isinstance(tensor, torch.Tensor):
        msg = (
            f"The KV cache of layer {name!r} is a {type(tensor).__name__}, not one tensor (recurrent state is kept "
            "like that): kvplug can't store it yet, so run this model without the connector."
        )
        raise UnsupportedError(msg)
    dim, ratio = _block_dim(name, tensor, num_blocks, page_size)
    item = tensor.element_size()
    block_stride = tensor.stride(dim) * ratio * item
    # One block, in elements: without the block dimension, but with its kernel blocks in front.
    dims = [
        (size, stride * item)
        for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if i != dim
    ]
    if ratio > 1:
        dims.insert(0, (ratio, tensor.stride(dim) * item))
    shape = tuple(size for size, _ in dims)
    order = tuple(sorted((i for i, size in enumerate(shape) if size > 1), key=lambda i: (-dims[i][1], i)))
    nbytes = prod(shape) * item
    _check_strides(name, tensor, num_blocks, [*(dims[i] for i in order), (num_blocks, block_stride)])
    if page_size is not None and not (nbytes == page_size or nbytes < page_size <= block_stride):
        what = f"its blocks have {nbytes} bytes, {block_stride} apart, but its spec says {page_size} bytes a block"
        raise _unknown(name, tensor, num_blocks, what)
    layer = Layer(name, str(tensor.dtype).removeprefix("torch."), shape, order, nbytes)
    sizes, strides, run = _merge([dims[i] for i in order], item)
    region = Region(
        storage=tensor.untyped_storage(),
        offset=int(tensor.storage_offset()) * item,
        num_blocks=num_blocks,
        block_stride=block_stride,
        sizes=sizes,
        strides=strides,
        run=run,
        slot_offset=0,
    )
    return layer, region


def fuse(regions: Sequence[Region]) -> list[Region]:
    """Join regions of several layers into fewer, and place them one after the other in the slot.

    Layers that are views of one storage, evenly spaced, become one region with a dimension more, or with longer runs
    where they follow each other in memory as in the slot.
    """
    fused: list[Region] = []
    end = 0
    start = 0
    while start < len(regions):
        first = regions[start]
        count = 1
        step = 0
        while start + count < len(regions):
            following = regions[start + count]
            distance = following.offset - regions[start + count - 1].offset
            if not _same_grid(first, following) or distance <= 0 or (count > 1 and distance != step):
                break
            step = distance
            count += 1
        dims = (
            [(count, step), *zip(first.sizes, first.strides, strict=True)]
            if count > 1
            else [*zip(first.sizes, first.strides, strict=True)]
        )
        sizes, strides, run = _merge(dims, first.run)
        fused.append(
            Region(
                first.storage, first.offset, first.num_blocks, first.block_stride, sizes, strides, run, slot_offset=end
            )
        )
        end += fused[-1].nbytes
        start += count
    return fused


def _same_grid(one: Region, other: Region) -> bool:
    return one.storage.data_ptr() == other.storage.data_ptr() and (
        (one.block_stride, one.sizes, one.strides, one.run)
        == (other.block_stride, other.sizes, other.strides, other.run)
    )


def _merge(dims: Sequence[tuple[int, int]], run: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Join dimensions that follow each other in memory. Returns sizes, strides and run of what remains."""
    merged: list[tuple[int, int]] = []
    for size, stride in reversed(dims):
        if not merged and stride == run:
            run *= size
        elif merged and stride == merged[0][0] * merged[0][1]:
            merged[0] = (size * merged[0][0], merged[0][1])
        else:
            merged.insert(0, (size, stride))
    return tuple(size for size, _ in merged), tuple(stride for _, stride in merged), run


def _block_dim(name: str, tensor: torch.Tensor, num_blocks: int, page_size: int | None) -> tuple[int, int]:
    """Return the block dimension, and the number of kernel blocks in a block."""
    shape = tensor.shape
    if tensor.ndim < 2 or tensor.numel() == 0:  # noqa: PLR2004  # one dimension for the blocks, one for what is in them
        raise _unknown(name, tensor, num_blocks, "it isn't made of blocks")
    known = [0, 1] if shape[0] == 2 and tensor.ndim > 2 else [0]  # noqa: PLR2004  # K and V
    possible = [dim for dim in known if shape[dim] % num_blocks == 0]
    if not possible:
        raise _unknown(name, tensor, num_blocks, "neither of the first two dimensions can be the block dimension")
    dim = possible[0] if len(possible) == 1 else _first_or_second(name, tensor, num_blocks, page_size)
    if shape[dim] != num_blocks and num_blocks in shape:
        # Kernel blocks in dimension `dim`, or a layout that we don't know?
        what = f"both dimension {dim} and dimension {list(shape).index(num_blocks)} can be the block dimension"
        raise _unknown(name, tensor, num_blocks, what)
    return dim, shape[dim] // num_blocks


def _first_or_second(name: str, tensor: torch.Tensor, num_blocks: int, page_size: int | None) -> int:
    """Decide about `[2, 2, ...]` with at most 2 blocks."""
    first, second = tensor.stride(0), tensor.stride(1)
    if second > first:
        # Blocks outermost in memory, K and V within them. No layout has blocks first in the shape, but not in memory.
        return 1
    block_bytes = tensor.numel() * tensor.element_size() // num_blocks
    if page_size is not None and first * tensor.element_size() == page_size > block_bytes:
        return 0  # padded blocks
    raise _unknown(name, tensor, num_blocks, "both of the first two dimensions can be the block dimension")


def _check_strides(name: str, tensor: torch.Tensor, num_blocks: int, dims: Sequence[tuple[int, int]]) -> None:
    """Make sure that no byte belongs to two elements: copying one block would then change another."""
    end = tensor.element_size()
    for size, stride in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if stride < end:
            raise _unknown(name, tensor, num_blocks, "its elements overlap in memory")
        end += (size - 1) * stride


def _unknown(name: str, tensor: torch.Tensor, num_blocks: int, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Can't find the blocks in the KV cache of layer {name!r}, because {what} "
        f"(shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}, {num_blocks} blocks): "
        "run without the connector, or with another --num-gpu-blocks-override if two dimensions are equal by chance, "
        "and report this line with the attention backend's name and the vLLM version."
    )
