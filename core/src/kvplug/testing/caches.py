"""Simulated paged caches: real tensors of vLLM's shapes, whose every element can be checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvplug.testing.errors import WrongKVError
from kvplug.testing.model import LayerValues, TokenSequence

__all__ = ["Layer", "make_layers"]

BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layer:
    """One layer's cache on one rank.

    Attributes:
        name: The layer's name.
        group: Its KV-cache group.
        rank: The worker's rank.
        spec: vLLM's specification of its cache.
        tensor: What connectors are given.
        is_state: Whether a block keeps one state instead of tokens.
        mode: vLLM's `mamba_cache_mode` of a state layer.
        window: Tokens of a sliding window; 0 for full attention.
        array: The tensor's memory as unsigned integers: [blocks, tokens, heads, elements], or [blocks, bytes].
        values: What the layer keeps.
    """

    name: str
    group: int
    rank: int
    spec: Any
    tensor: Any
    is_state: bool
    mode: str
    window: int
    array: npt.NDArray[Any]
    values: LayerValues

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.spec.block_size)

    def verify_tokens(self, request_id: str, sequence: TokenSequence, table: BlockIds, start: int, end: int) -> None:
        """Check that the positions from `start` to `end` - 1 hold their values.

        Raises:
            WrongKVError: One of them doesn't.
        """
        if start >= end:
            return
        size = self.block_size
        first, last = start // size, -(-end // size)
        blocks = table[first:last]
        if len(blocks) < last - first:
            self._wrong(request_id, max(start, len(table) * size), None, "the block table ends before it")
        got = self.array[blocks].reshape(len(blocks) * size, -1)[start - first * size : end - first * size]
        expected = sequence.values(self.values, end)[start:]
        if not np.array_equal(got, expected):
            index = int(np.argmax((got != expected).any(axis=1)))
            position = start + index
            self._wrong(request_id, position, int(blocks[position // size - first]), _describe(got[index]))

    def write_tokens(self, sequence: TokenSequence, table: BlockIds, start: int, end: int, valid: int) -> None:
        """Compute the positions from `start` to `end` - 1; from `valid` on they are drafts that nobody wanted."""
        size = self.block_size
        values = sequence.values(self.values, end)[start:]
        if valid < end:
            values = values.copy()
            values[max(0, valid - start) :] ^= 1
        if end - start == 1:
            self.array[table[start // size], start % size] = values.reshape(self.array.shape[2:])
            return
        positions = np.arange(start, end)
        self.array[table[positions // size], positions % size] = values.reshape(-1, *self.array.shape[2:])

    def verify_state(self, request_id: str, sequence: TokenSequence, block_id: int, num_tokens: int) -> None:
        """Check that a block holds the state after the first `num_tokens` tokens.

        Raises:
            WrongKVError: It doesn't.
        """
        expected = self.values.of(sequence.hashes(num_tokens - 1, num_tokens))[0]
        got = self.array[block_id]
        if not np.array_equal(got, expected):
            self._wrong(request_id, num_tokens - 1, block_id, _describe(got))

    def write_state(self, sequence: TokenSequence, block_id: int, num_tokens: int) -> None:
        """Put the state after the first `num_tokens` tokens into a block."""
        self.array[block_id] = self.values.of(sequence.hashes(num_tokens - 1, num_tokens))[0]

    def _wrong(self, request_id: str, position: int, block_id: int | None, found: str) -> None:
        raise WrongKVError(
            request_id,
            group=self.group,
            layer=self.name,
            rank=self.rank,
            position=position,
            block_id=block_id,
            found=found,
        )


def _describe(found: npt.NDArray[Any]) -> str:
    if not found.any():
        return "it is all zeros"
    return "it holds " + " ".join(f"{int(value):x}" for value in found.ravel()[:4]) + " …, which is other data"


def make_layers(kv_cache_config: Any, *, rank: int, tensor_rank: int) -> list[Layer]:
    """Allocate a rank's caches, in the order of the layers' names.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig` of the rank.
        rank: The rank.
        tensor_rank: The rank in its tensor-parallel group: its layers hold other values than those of the others.
    """
    import torch
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    num_blocks, layout = kv_cache_config.num_blocks, KVCacheLayout[kv_cache_config.kv_cache_layout]
    group_of = {
        name: (index, interface_spec(group, name))
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
    # All placements are views of one storage: groups overlay each other, with block ids of their own.
    storage = torch.zeros(max(placement.size for placement in kv_cache_config.kv_cache_tensors), dtype=torch.int8)
    layers = []
    for placement in kv_cache_config.kv_cache_tensors:
        spec = group_of[placement.layers[0]][1]
        views = interface.create_kv_cache_views(storage, spec, num_blocks, layout, placement)
        layers += [
            _layer(name, *group_of[name], view, rank=rank, tensor_rank=tensor_rank)
            for name, view in zip(placement.layers, views, strict=True)
        ]
    return sorted(layers, key=lambda layer: layer.name)


def interface_spec(group: Any, name: str) -> Any:
    """Return the specification of one layer of a group."""
    return getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)


def _layer(name: str, group: int, spec: Any, tensor: Any, *, rank: int, tensor_rank: int) -> Layer:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

    is_state = isinstance(spec, MambaSpec)
    # The latent vector of MLA is the same on all ranks.
    shard = 0 if isinstance(spec, MLAAttentionSpec) else tensor_rank
    raw = tensor.view(torch.uint8).numpy()
    if is_state:
        array, values = raw[:, 0, 0, :], LayerValues(f"{name}/{shard}", raw.shape[-1], 0)
    else:
        itemsize = tensor.element_size()
        array = raw.view(f"u{itemsize}").transpose(0, 2, 1, 3)
        values = LayerValues(f"{name}/{shard}", array.shape[2] * array.shape[3] * itemsize, itemsize)
    return Layer(
        name=name,
        group=group,
        rank=rank,
        spec=spec,
        tensor=tensor,
        is_state=is_state,
        mode=getattr(spec, "mamba_cache_mode", ""),
        window=int(getattr(spec, "sliding_window", None) or 0),
        array=array,
        values=values,
    )


def zero_blocks(layers: Iterable[Layer], block_ids: Sequence[int]) -> None:
    """Clear blocks in all attention layers, as vLLM's runners do."""
    for layer in layers:
        if not layer.is_state:
            layer.array[block_ids] = 0


def copy_blocks(layers: Iterable[Layer], num_blocks: int, copies: Sequence[Any]) -> None:
    """Copy whole blocks in all layers, as vLLM's runners do for copy-on-write."""
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    copy_kv_cache_blocks_inplace([layer.tensor for layer in layers], num_blocks, copies)
