"""What a live connector of ours has in its L1: taking it out, putting another engine's in, spoiling it."""

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


@dataclass(frozen=True)
class _Content:
    """Where a connector has its blocks: type1 all of it in the worker, type2 the bookkeeping in the scheduler half."""

    allocator: Any
    slab: Any
    #: Bytes of a block in each layer, of the first KV-cache group.
    layers: dict[str, int]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the first KV-cache group."""
        return sum(self.layers.values())

    def slots(self) -> dict[bytes, int]:
        """Return where each block is that can be found, by its key."""
        return dict(self.allocator._index)


def _content(llm: Any) -> _Content:
    worker = engine.connector(llm).worker
    if hasattr(worker, "tier"):
        tier = worker.tier
        return _Content(tier.allocator, tier.slab, {layer.name: layer.nbytes for layer in worker.paged.layers})
    engine.settle(llm)  # what is being saved can't be found yet
    layers = {layer.name: layer.nbytes for layer in worker._paged.caches[0].layers}
    return _Content(engine.scheduler(llm).connector.scheduler.store.allocator, worker._slab, layers)


def take(llm: Any) -> Stored:
    """Return what is in L1; of several KV-cache groups, that of the first one, with whatever the others have."""
    content = _content(llm)
    blocks = {key: content.slab.view(slot)[: content.block_bytes].tobytes() for key, slot in content.slots().items()}
    return Stored(_half_with_keys(llm)._namespace, content.layers, blocks)


def put(llm: Any, stored: Stored) -> None:
    """Put another engine's blocks into L1, under that engine's keys."""
    content = _content(llm)
    refs = content.allocator.reserve(list(stored.blocks))
    for ref, block in zip(refs, stored.blocks.values(), strict=True):
        assert len(block) == content.slab.slot_bytes, "blocks of another size can't be confused with this engine's"
        content.slab.view(ref.slot)[:] = np.frombuffer(block, np.uint8)
    assert content.allocator.publish(refs) == len(refs)


def adopt(llm: Any, stored: Stored) -> None:
    """Let requests that come from now on have another engine's keys: as if keys didn't say whose blocks they are."""
    _half_with_keys(llm)._namespace = stored.namespace


def _half_with_keys(llm: Any) -> Any:
    """Return what makes requests' keys."""
    scheduler = engine.scheduler(llm).connector.scheduler
    return scheduler if hasattr(scheduler, "_namespace") else scheduler._keys


def corrupt(llm: Any, layers: str = "") -> None:
    """Give every key another block's KV, with the layers exchanged.

    Exchanging blocks alone wouldn't do: attention doesn't care in which order a sequence's KV comes.

    Args:
        llm: The engine.
        layers: Only layers whose names start with this; they follow each other in a block.
    """
    content = _content(llm)
    slots = sorted(content.slots().values())
    assert len(slots) > 1, "nothing to exchange"
    start, stop = _range_of_layers(content.layers, layers) if layers else (0, content.slab.slot_bytes)
    contents = [content.slab.view(slot)[start:stop].copy() for slot in slots]
    for slot, other in zip(slots, contents[1:] + contents[:1], strict=True):
        content.slab.view(slot)[start:stop] = np.roll(other, (stop - start) // 2)


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
