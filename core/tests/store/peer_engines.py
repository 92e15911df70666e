"""Engines of one model with different parallel sizes, over one tier: their ranks' caches, and clients of both kinds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from tiers import DictTier

from kvplug.kv_groups import KVGroup
from kvplug.namespace import Shard, own_shard
from kvplug.paged.facts import PeerFacts
from kvplug.paged.groups import PagedGroups
from kvplug.stats import Stats
from kvplug.store import Slab
from kvplug.store.l2.blocks import Blocks
from kvplug.store.l2.breaker import Breaker
from kvplug.store.l2.client import L2Client
from kvplug.store.l2.keys import StorageKeys
from kvplug.store.l2.value import HEADER_BYTES, layout_digest
from kvplug.store.tiered.peers import make_peers

BLOCKS, SLOTS = 5, 16

#: What tensors of a layer look like: logical dimensions, dimensions as in memory (L: all layers in one storage), and
#: kernel blocks per block. K tells keys from values; C is both together, innermost.
LAYOUTS = {
    "NHD, K first": ("KBNHD", "KBNHD", 1),
    "HND, K first": ("KBNHD", "KBHND", 1),
    "NHD, blocks first": ("BKNHD", "BKNHD", 1),
    "HND, blocks first": ("BKNHD", "BKHND", 1),
    "K within blocks in memory": ("KBNHD", "BKNHD", 1),
    "heads before tokens, K first": ("KBHND", "KBHND", 1),
    "CPU": ("BHNC", "BHNC", 1),
    "LBNHC": ("BHNC", "LBNHC", 1),
    "LHBNC": ("BHNC", "LHBNC", 1),
    "BLHNC": ("BHNC", "BLHNC", 1),
    "BLNHC": ("BHNC", "BLNHC", 1),
    "BHLNC": ("BHNC", "BHLNC", 1),
    "kernel blocks": ("KBNHD", "KBNHD", 2),
    "kernel blocks, HND": ("BHNC", "BHNC", 2),
}


class FullAttentionSpec(SimpleNamespace):
    """Stands for vLLM's class of that name."""


class SlidingWindowSpec(SimpleNamespace):
    """Stands for vLLM's class of that name."""


class MLAAttentionSpec(FullAttentionSpec):
    """Stands for vLLM's class of that name."""


@functools.cache
def _numbers(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)


@dataclass(frozen=True)
class Model:
    """A model, and what is in its blocks: numbers that are different for each layer, head, token and element."""

    layers: int = 4
    heads: int = 8
    tokens: int = 16
    width: int = 4
    latent: bool = False
    #: KV-cache groups: layer number modulo this.
    groups: int = 1
    dtype: torch.dtype = torch.int16
    config: dict[str, Any] = field(default_factory=dict)

    def content(self, layer: int, block: int) -> torch.Tensor:
        """Return a block of one layer over all heads: `[2, tokens, heads, width]`."""
        numbers = _numbers(layer * 1000 + block, (2, self.tokens, self.heads, self.width))
        return numbers if self.dtype == torch.int16 else numbers.view(self.dtype)

    def vllm_config(self, tp: int, pp: int, rank: int) -> Any:
        """Return a rank's configuration, as far as it is looked at."""
        model = SimpleNamespace(use_mla=self.latent, hf_text_config=dict(self.config))
        model.get_total_num_hidden_layers = lambda: self.layers
        model.get_total_num_kv_heads = lambda: self.heads

        def layer_range(parallel: Any) -> tuple[int, int]:
            share, stages = self.layers // parallel.pipeline_parallel_size, parallel.pipeline_parallel_size
            stage = parallel.rank // parallel.tensor_parallel_size % stages
            return stage * share, self.layers if stage == stages - 1 else (stage + 1) * share

        model.get_layers_start_end_indices = layer_range
        parallel = SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp, rank=rank)
        return SimpleNamespace(model_config=model, parallel_config=parallel, speculative_config=None)

    def spec(self, group: int, heads: int) -> Any:
        """Return the KV-cache spec of a group's layers in a rank that has so many heads."""
        if self.latent:
            return MLAAttentionSpec(block_size=self.tokens, num_kv_heads=1, head_size=2 * self.width)
        kind = SlidingWindowSpec if group else FullAttentionSpec
        return kind(block_size=self.tokens, num_kv_heads=heads, head_size=self.width)


def name_of(layer: int) -> str:
    """Return a layer's name, as vLLM has it."""
    return f"model.layers.{layer}.self_attn.attn"


def caches_of(model: Model, layout: str, shard: Shard) -> dict[str, torch.Tensor]:
    """Return a rank's caches, in which each block holds what it has in the model."""
    numbers = range(*shard.layers)
    if model.latent:
        raw = torch.zeros(len(numbers), BLOCKS, model.tokens, 2 * model.width, dtype=model.dtype)
        for index, number in enumerate(numbers):
            for block in range(BLOCKS):
                raw[index, block] = model.content(number, block)[:, :, 0].transpose(0, 1).flatten(1)
        return {name_of(number): raw[index] for index, number in enumerate(numbers)}
    logical, memory, ratio = LAYOUTS[layout]
    sizes = {
        "L": len(numbers) if "L" in memory else 1,
        "B": BLOCKS * ratio,
        "K": 2,
        "N": model.tokens // ratio,
        "H": shard.heads[1] - shard.heads[0],
        "D": model.width,
    }
    memory = memory.replace("C", "KD")
    caches = {}
    shared = torch.zeros([sizes[axis] for axis in memory], dtype=model.dtype)
    for index, number in enumerate(numbers):
        raw = shared if "L" in memory else torch.zeros_like(shared)
        axes = memory
        if "L" in memory:
            raw = raw.select(memory.index("L"), index)
            axes = memory.replace("L", "")
        whole = raw.permute([axes.index(axis) for axis in "BKNHD"])
        for block in range(BLOCKS):
            for piece, tokens in enumerate(model.content(number, block).chunk(ratio, dim=1)):
                whole[block * ratio + piece] = tokens[:, :, slice(*shard.heads)]
        shown = raw.permute([axes.index(axis) for axis in logical.replace("C", "KD")])
        if "C" in logical:
            # As vLLM does: `flatten` might give another stride to a dimension of size 1.
            shown = shown.as_strided((*shown.shape[:-2], 2 * model.width), (*shown.stride()[:-2], 1))
        caches[name_of(number)] = shown
    return caches


class Rank:
    """One rank: a paged cache that holds all blocks of the model, a slab, and clients of the tier."""

    def __init__(
        self,
        model: Model,
        layout: str,
        sizes: tuple[int, int],
        rank: int,
        values: dict[bytes, bytes],
        *,
        peers: Sequence[tuple[int, int]] = (),
        tier: type[DictTier] = DictTier,
        codec: Any = None,
        namespace: str = "",
        change: Any = lambda rank: None,
    ) -> None:
        config = model.vllm_config(*sizes, rank)
        self.model = model
        self.shard = own_shard(config)
        self.caches = caches_of(model, layout, self.shard)
        heads = self.shard.heads[1] - self.shard.heads[0]
        names = [
            [name_of(number) for number in range(*self.shard.layers) if number % model.groups == group]
            for group in range(model.groups)
        ]
        self.specs = [model.spec(group, heads) for group in range(model.groups)]
        kinds = ["window" if group else "full" for group in range(model.groups)]
        self.groups = [
            KVGroup(index, kind, model.tokens, 64 if index else 0, False, dict.fromkeys(mine))  # type: ignore[arg-type]
            for index, (kind, mine) in enumerate(zip(kinds, names, strict=True))
        ]
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(layer_names=mine, kv_cache_spec=spec)
                for mine, spec in zip(names, self.specs, strict=True)
            ]
        )
        self.config = config
        change(self)
        self.paged = PagedGroups.from_kv_caches(self.caches, self.groups, num_blocks=BLOCKS)
        self.layout = f"{', '.join(str(group.block_size) for group in self.groups)} tokens; {self.paged.layout}"
        self.slab = Slab(SLOTS, self.paged.slot_bytes, header_bytes=HEADER_BYTES)
        self.keys = StorageKeys(str(self.shard), self.layout, namespace=namespace)
        self.tier = tier(values)
        self.stats = Stats()
        blocks = Blocks(self.slab, self.keys, layout_digest(str(self.shard), self.layout), codec)
        self.client = L2Client(
            self.tier, blocks, self.stats, timeout=30.0, lookup_timeout=30.0, breaker=Breaker(failures=1000)
        )
        self.client.start()
        facts = PeerFacts.of(self.config, self.kv_cache_config, peers)
        self.facts = facts
        self.peers, self.reasons = make_peers(
            facts,
            [self.client],
            self.stats,
            paged=self.paged,
            kv_caches=self.caches,
            groups=self.groups,
            layout=self.layout,
            namespace=namespace,
        )

    def group_of(self, key: bytes) -> int:
        """Return the group of a key: its last byte, where there are several."""
        return key[-1] if self.model.groups > 1 else 0

    def save(self, *keys: bytes) -> None:
        """Write blocks, whose number is the first byte of their keys, to the tier."""
        slots = range(len(keys))
        for key, slot in zip(keys, slots, strict=True):
            self.slab.view(slot)[:] = 0xAA
            self.paged.caches[self.group_of(key)].gather([key[0]], self.slab, [slot]).wait()
        writing = self.client.put(keys, slots)
        assert writing.wait()
        assert writing.result == [True] * len(keys)

    def expected(self, key: bytes) -> bytes:
        """Return what must be in the slot that a block was read into."""
        cache = self.paged.caches[self.group_of(key)]
        cache.gather([key[0]], self.slab, [SLOTS - 1]).wait()
        return self.slab.view(SLOTS - 1)[: cache.block_bytes].tobytes()

    def read(self, *keys: bytes, peer: int = 0) -> list[bool]:
        """Read blocks as other ranks have stored them, and check that those that are there are right."""
        slots = range(len(keys))
        for slot in slots:
            self.slab.view(slot)[:] = 0x55
        reading = self.peers[peer].get(keys, slots)
        assert reading.wait()
        for key, slot, there in zip(keys, slots, reading.result, strict=True):
            expected = self.expected(key)
            assert (self.slab.view(slot)[: len(expected)].tobytes() == expected) is there
        return reading.result

    def look_up(self, *keys: bytes, peer: int = 0) -> list[bool]:
        """Look blocks up as other ranks have stored them."""
        looking = self.peers[peer].exists(keys)
        assert looking.wait()
        return looking.result


def engine(model: Model, layout: str, sizes: tuple[int, int], values: dict[bytes, bytes], **options: Any) -> list[Rank]:
    """Return all ranks of an engine."""
    return [Rank(model, layout, sizes, rank, values, **options) for rank in range(sizes[0] * sizes[1])]


def key_of(block: int, group: int | None = None) -> bytes:
    """Return the key of a block; with its group's number at the end, where there are several."""
    return bytes([block]) * 32 + (b"" if group is None else bytes([group]))
