"""What a live type1 worker has in its L1: taking it out, putting another engine's in, spoiling it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from support import llm as engine

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Stored:
    """The content of one engine's L1.

    Attributes:
        namespace: What the engine's keys start from.
        layers: Bytes of a block in each layer, by the layer's name, in their order in a block.
        blocks: The bytes of each block, by its key.
    """

    namespace: bytes
    layers: Mapping[str, int]
    blocks: Mapping[bytes, bytes]

    def layer(self, key: bytes, name: str) -> np.ndarray[Any, Any]:
        """Return the bytes of one layer's part of a block."""
        start, stop = _range_of_layers(self.layers, name)
        return np.frombuffer(self.blocks[key][start:stop], np.uint8)


def take(llm: Any) -> Stored:
    """Return what is in L1."""
    worker = engine.connector(llm).worker
    blocks: dict[bytes, bytes] = {}
    for key in list(worker.tier.allocator._index):
        with worker.tier.reading([key]) as slots:
            blocks.update((key, worker.tier.slab.view(slot)[: worker.paged.block_bytes].tobytes()) for slot in slots)
    layers = {layer.name: layer.nbytes for layer in worker.paged.layers}
    return Stored(engine.scheduler(llm).connector.scheduler._namespace, layers, blocks)


def put(llm: Any, stored: Stored) -> None:
    """Put another engine's blocks into L1, under that engine's keys."""
    tier = engine.connector(llm).worker.tier
    with tier.writing(list(stored.blocks)) as slots:
        for slot, block in zip(slots, stored.blocks.values(), strict=True):
            assert len(block) == tier.slab.slot_bytes, "blocks of another size can't be confused with this engine's"
            tier.slab.view(slot)[:] = np.frombuffer(block, np.uint8)


def adopt(llm: Any, stored: Stored) -> None:
    """Let requests that come from now on have another engine's keys: as if keys didn't say whose blocks they are."""
    engine.scheduler(llm).connector.scheduler._namespace = stored.namespace


def corrupt(llm: Any, layers: str = "") -> None:
    """Give every key another block's KV, with the layers exchanged.

    Exchanging blocks alone wouldn't do: attention doesn't care in which order a sequence's KV comes.

    Args:
        llm: The engine.
        layers: Only layers whose names start with this; they follow each other in a block.
    """
    worker = engine.connector(llm).worker
    tier = worker.tier
    used = tier.allocator.used
    assert used > 1, "nothing to exchange"
    start, stop = _range_of_layers({layer.name: layer.nbytes for layer in worker.paged.layers}, layers)
    contents = [tier.slab.view(slot)[start:stop].copy() for slot in range(used)]
    for slot in range(used):
        tier.slab.view(slot)[start:stop] = np.roll(contents[(slot + 1) % used], (stop - start) // 2)


def _range_of_layers(layers: Mapping[str, int], prefix: str) -> tuple[int, int]:
    position = 0
    ranges = []
    for name, size in layers.items():
        if name.startswith(prefix):
            ranges.append((position, position + size))
        position += size
    assert ranges, f"no layer's name starts with {prefix!r}: {list(layers)}"
    start, stop = ranges[0][0], ranges[-1][1]
    assert stop - start == sum(end - begin for begin, end in ranges), "other layers are between them"
    return start, stop
