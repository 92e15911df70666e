"""Which bytes of one rank's share of a block are where in another's: layers, and KV heads within them.

A share is a block's layers one after the other, each as an array in the order in which it is in memory
(`PagedCache`). Ranks of engines with other parallel sizes have other layers, and other KV heads in them. As the heads
are one dimension of a layer's array, what two shares have in common is a slice of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplug.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from kvplug.paged.layout import Layer

__all__ = ["Move", "Sliced", "find_heads", "is_latent", "joined", "move"]

#: Specs of latent attention: one vector for all heads, equal on all tensor-parallel ranks.
_LATENT = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
#: Dimensions of one block of a layer in the tensors that vLLM has: heads, tokens and content in some order; and behind
#: one that tells K from V.
_FUSED, _SPLIT = 3, 4


@dataclass(frozen=True)
class Sliced:
    """A layer's part of a block, cut along its KV heads.

    Attributes:
        layer: The layer.
        heads: Its KV heads; 1 where all ranks have all of it.
        axis: The dimension of its shape that the heads are; None where all ranks have all of it.
        order: As the layer's, with `axis` in it if that has size 1.

    """

    layer: Layer
    heads: int = 1
    axis: int | None = None
    order: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """How often the heads come, one after the other."""
        return 1 if self.axis is None else prod(self.layer.shape[dim] for dim in self.order[: self._position])

    @property
    def run(self) -> int:
        """Bytes that belong to one head, each time."""
        return self.layer.nbytes // (self.rows * self.heads)

    @property
    def _position(self) -> int:
        assert self.axis is not None
        return self.order.index(self.axis)

    def with_heads(self, heads: int) -> Layer:
        """Return the layer as a rank has it that holds so many KV heads of it."""
        if self.axis is None:
            return self.layer
        shape = tuple(heads if dim == self.axis else size for dim, size in enumerate(self.layer.shape))
        return replace(
            self.layer,
            shape=shape,
            order=tuple(dim for dim in self.order if shape[dim] > 1),
            nbytes=self.layer.nbytes // self.heads * heads,
        )


@dataclass(frozen=True)
class Move:
    """Heads to copy from one share to another: in both, an array `[rows, heads, run]` of bytes.

    Attributes:
        source: First byte of the array in the share that is read.
        target: First byte of the array in the one that is written.
        rows: How often the heads come.
        run: Bytes of one head in a row.
        source_heads: Heads of the array that is read.
        target_heads: Heads of the array that is written.
        source_first: First head to copy.
        target_first: Where it goes.
        heads: How many to copy.

    """

    source: int
    target: int
    rows: int
    run: int
    source_heads: int = 1
    target_heads: int = 1
    source_first: int = 0
    target_first: int = 0
    heads: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return self.rows * self.heads * self.run


def move(moves: Iterable[Move], source: memoryview, target: memoryview) -> None:
    """Copy heads of one share to another.

    Args:
        moves: What to copy.
        source: The share to read.
        target: The share to write. Nothing else of it is changed.

    """
    theirs, ours = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    for one in moves:
        there = _array(theirs, one.source, (one.rows, one.source_heads, one.run))
        here = _array(ours, one.target, (one.rows, one.target_heads, one.run))
        # numpy copies without the interpreter's lock.
        np.copyto(
            here[:, one.target_first : one.target_first + one.heads],
            there[:, one.source_first : one.source_first + one.heads],
        )


def _array(memory: Any, start: int, shape: tuple[int, int, int]) -> Any:
    return memory[start : start + prod(shape)].reshape(shape)


def joined(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Join moves of layers that follow each other in both shares, and are alike, into one."""
    found: list[Move] = []
    for one in moves:
        if found:
            last = found[-1]
            follows = replace(
                one,
                source=one.source - last.rows * last.source_heads * last.run,
                target=one.target - last.rows * last.target_heads * last.run,
                rows=last.rows,
            )
            if follows == last:
                found[-1] = replace(last, rows=last.rows + one.rows)
                continue
        found.append(one)
    return tuple(found)


def is_latent(spec: Any) -> bool:
    """Say whether a layer has latent attention, by its KV-cache spec."""
    return not _LATENT.isdisjoint(cls.__name__ for cls in type(spec).__mro__)


def find_heads(layer: Layer, tensor: torch.Tensor, spec: Any, num_blocks: int) -> Sliced:
    """Find out which dimension of a layer's part of a block are its KV heads.

    Args:
        layer: The layer.
        tensor: What vLLM registered for it.
        spec: Its KV-cache spec.
        num_blocks: Number of blocks in block tables.

    Raises:
        UnsupportedError: That isn't sure.

    """
    if is_latent(spec):
        # By its name, and by what newer releases say of it.
        if getattr(spec, "max_tp_shards", 1) != 1 or spec.num_kv_heads != 1:
            raise _unsure(layer, "its latent vectors may be spread over tensor-parallel ranks")
        return Sliced(layer)
    for name, usual in (("num_head_slots", None), ("state_content_bytes", None), ("tokens_per_state", 1)):
        if getattr(spec, name, usual) != usual:
            raise _unsure(layer, f"its KV is packed ({name} is {getattr(spec, name)})")
    heads, axis = int(spec.num_kv_heads), _heads_axis(layer, tensor, spec)
    order = layer.order
    if axis not in order:
        order = _with_axis(layer, tensor, num_blocks, axis)
    return Sliced(layer, heads, axis, order)


def _heads_axis(layer: Layer, tensor: torch.Tensor, spec: Any) -> int:
    # In kernel blocks, their number is in front.
    first = len(layer.shape) + 1 - tensor.ndim
    kernel_blocks = layer.shape[0] if first else 1
    heads, tokens, rest = int(spec.num_kv_heads), spec.block_size / kernel_blocks, len(layer.shape) - first
    width_k, width_v = int(spec.head_size), int(getattr(spec, "head_size_v", None) or spec.head_size)
    content = layer.shape[-1]
    if rest == _SPLIT and layer.shape[first] == 2 and content == width_k == width_v:  # noqa: PLR2004  # K and V
        first += 1
    elif rest != _FUSED or content != width_k + width_v:
        raise _unsure(
            layer, f"no dimensions for {heads} KV heads, {spec.block_size} tokens and their content are known"
        )
    found = layer.shape[first], layer.shape[first + 1]
    if found == (heads, tokens) and (heads != tokens or (rest == _FUSED and hasattr(spec, "num_heads"))):
        # Releases whose specs have `num_heads` have heads before tokens in the shape, wherever they are in memory.
        return first
    if found == (tokens, heads) and heads != tokens:
        return first + 1
    raise _unsure(layer, f"of its dimensions, any or none may be the {heads} KV heads")


def _with_axis(layer: Layer, tensor: torch.Tensor, num_blocks: int, axis: int) -> tuple[int, ...]:
    """Return a layer's dimensions as they are in memory, one of size 1 included, whose stride tells where it is.

    Its stride is that of the dimension around it, if that is the only thing between them, so it is within that one. A
    mistake does no harm: the text of the layout would be one that nobody stores blocks with.
    """
    block_dims = [
        dim
        for dim in (0, 1)
        if tensor.shape[dim] % num_blocks == 0
        and (*tensor.shape[:dim], *tensor.shape[dim + 1 :]) == layer.shape[len(layer.shape) + 1 - tensor.ndim :]
    ]
    if len(block_dims) != 1:
        raise _unsure(layer, "its block dimension isn't known")
    strides = [tensor.stride(dim) for dim in range(tensor.ndim) if dim != block_dims[0]]
    if len(layer.shape) == tensor.ndim:
        strides.insert(0, tensor.stride(block_dims[0]))
    before = sum(strides[dim] >= strides[axis] for dim in layer.order)
    return (*layer.order[:before], axis, *layer.order[before:])


def _unsure(layer: Layer, why: str) -> UnsupportedError:
    return UnsupportedError(f"it isn't sure which KV heads are where in layer {layer.name} ({layer.layout}): {why}")
