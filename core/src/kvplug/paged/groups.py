"""The paged KV caches of all KV-cache groups of a model, in slots of one size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplug.paged.cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvplug.kv_groups import KVGroup

__all__ = ["PagedGroups"]


class PagedGroups:
    """One `PagedCache` for each KV-cache group.

    vLLM gives all groups blocks from one pool, so a block id belongs to one group at a time, and the groups' blocks
    are about as large. So a slot holds a block of any group: it is as large as the largest.

    Args:
        caches: The groups' caches, in the order of the groups.

    Attributes:
        caches: The groups' caches.
        slot_bytes: Bytes of the largest block.
        layout: Describes the bytes of a slot, as text. Of one group, that group's.

    """

    def __init__(self, caches: Sequence[PagedCache]) -> None:
        self.caches = tuple(caches)
        self.slot_bytes = max(cache.block_bytes for cache in caches)
        self.layout = " | ".join(cache.layout for cache in caches)

    @classmethod
    def from_kv_caches(
        cls, kv_caches: Mapping[str, torch.Tensor], groups: Sequence[KVGroup], *, num_blocks: int
    ) -> PagedGroups:
        """Find the blocks in what vLLM gives to `register_kv_caches`.

        Args:
            kv_caches: The layers of all groups, by name.
            groups: The groups.
            num_blocks: Number of blocks in block tables (`KVCacheConfig.num_blocks`).

        Raises:
            UnsupportedError: A layer's blocks can't be found for sure, or its memory is where kvplug can't copy.
            ValueError: A group has no layers here.

        """
        return cls(
            [
                PagedCache.from_kv_caches(
                    # What isn't in the spec shares the cache of a layer that is.
                    {name: tensor for name, tensor in kv_caches.items() if name in group.page_size_bytes}
                    if len(groups) > 1
                    else kv_caches,
                    num_blocks=num_blocks,
                    page_size_bytes=group.page_size_bytes,
                )
                for group in groups
            ]
        )
