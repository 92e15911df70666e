"""The memory tier of one worker: a slab, and the allocator that directs it."""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvplug.errors import ConfigError
from kvplug.store.allocator import Allocator
from kvplug.store.policies import make_policy
from kvplug.store.slab import Slab, slot_stride

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MemoryTier", "slots_within"]


def slots_within(capacity_bytes: int, slot_bytes: int, header_bytes: int = 0) -> int:
    """Return how many slots of a slab fit.

    Args:
        capacity_bytes: Bytes of host memory.
        slot_bytes: Bytes of a slot's payload.
        header_bytes: Bytes in front of each.

    Raises:
        ConfigError: Not even one fits.

    """
    stride = slot_stride(slot_bytes, header_bytes)
    num_slots = capacity_bytes // mmap.PAGESIZE * mmap.PAGESIZE // stride
    if num_slots < 1:
        msg = (
            f"A capacity of {capacity_bytes} bytes holds no block of this model, which takes "
            f"{stride} bytes: set a larger one."
        )
        raise ConfigError(msg)
    return num_slots


class MemoryTier:
    """Host memory that keeps blocks by key, for a worker that decides by itself what to load and save.

    Args:
        slab: The memory. The tier closes it.
        allocator: The bookkeeping, for as many slots as the slab has.

    Raises:
        ValueError: The two have different numbers of slots.

    """

    def __init__(self, slab: Slab, allocator: Allocator) -> None:
        if slab.num_slots != allocator.capacity:
            msg = f"the slab has {slab.num_slots} slots, the allocator {allocator.capacity}"
            raise ValueError(msg)
        self.slab = slab
        self.allocator = allocator

    @classmethod
    def with_capacity(
        cls,
        capacity_bytes: int,
        slot_bytes: int,
        *,
        header_bytes: int = 0,
        policy: str = "lru",
        pin: bool = False,
        background: bool = False,
    ) -> MemoryTier:
        """Make a tier that takes at most `capacity_bytes` of host memory.

        Args:
            capacity_bytes: Bytes of host memory for this worker.
            slot_bytes: Bytes of a block over all layers (`PagedCache.block_bytes`).
            header_bytes: Bytes in front of each block, for the header that L2 tiers keep with it.
            policy: Name of the eviction policy.
            pin: Pin the memory, for copies to and from a GPU.
            background: Back the memory, and pin it, in the background, instead of as it is written.

        Raises:
            ConfigError: Not even one block fits, or there is no such policy.
            KvplugError: The memory can't be had.

        """
        num_slots = slots_within(capacity_bytes, slot_bytes, header_bytes)
        allocator = Allocator(num_slots, make_policy(policy, num_slots))
        return cls(Slab(num_slots, slot_bytes, header_bytes=header_bytes, pin=pin, background=background), allocator)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of host memory that the tier may take."""
        return self.slab.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold something."""
        return self.allocator.used * self.slab.slot_stride

    @contextmanager
    def reading(self, keys: Sequence[bytes]) -> Iterator[list[int]]:
        """Hold the longest run of leading keys that is there, while their blocks are copied out of the slab.

        Gives the numbers of their slots, in order: as many as there are hits. They stay as they are until the
        block ends, so a copy that runs asynchronously must be waited for inside.
        """
        refs = self.allocator.pin_prefix(keys)
        try:
            yield [ref.slot for ref in refs]
        finally:
            self.allocator.unpin(refs)

    @contextmanager
    def writing(self, keys: Sequence[bytes]) -> Iterator[list[int | None]]:
        """Hold slots for new keys while their blocks are copied into the slab, then let them be found.

        Gives one item per key, in order: the number of the slot to write, or None if there is nothing to write (the
        key is there, or is being written, or no slot could be had). A copy that runs asynchronously must be waited for
        inside. If the block raises, none of the keys is there afterwards, and the error goes on.
        """
        reserved = self.allocator.reserve(keys)
        refs = [ref for ref in reserved if ref is not None]
        try:
            yield [None if ref is None else ref.slot for ref in reserved]
        except BaseException:
            self.allocator.abandon(refs)
            raise
        self.allocator.publish(refs)

    def clear(self) -> bool:
        """Forget all blocks, and return whether all slots are free now (see `Allocator.clear`)."""
        return self.allocator.clear()

    def close(self) -> None:
        """Forget all blocks and give the memory back. Copies must have ended before."""
        self.allocator.clear()
        self.slab.close()
