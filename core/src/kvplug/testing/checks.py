"""What must hold of vLLM's block pool and queues between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvplug.testing.caches import Layer
from kvplug.testing.errors import InvariantError
from kvplug.testing.model import TokenSequence

__all__ = ["CacheAudit", "check_blocks", "check_idle"]


def check_blocks(scheduler: Any) -> None:
    """Check that the block pool and the requests' block tables agree.

    A block in a table is in use, as often as tables have it or more often (connectors may hold blocks), and not
    in the free queue. A block is in the free queue exactly if nobody uses it.

    Raises:
        InvariantError: Something doesn't agree.
    """
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    uses: Counter[int] = Counter()
    group_of: dict[int, int] = {}
    for request_id, request in scheduler.requests.items():
        for group, blocks in enumerate(manager.get_blocks(request_id).blocks):
            for block in blocks:
                if block.is_null:
                    continue
                uses[block.block_id] += 1
                if group_of.setdefault(block.block_id, group) != group:
                    raise InvariantError(f"block {block.block_id} is in two groups, of which one is {request_id!r}'s")
        if request.num_computed_tokens < 0:
            raise InvariantError(f"request {request_id!r} has {request.num_computed_tokens} computed tokens")
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    is_free = set(free)
    if len(free) != len(is_free) or len(free) != pool.get_num_free_blocks():
        raise InvariantError(f"the free queue has {len(free)} blocks, {len(is_free)} of them different")
    for block in pool.blocks:
        if block.is_null:
            continue
        if block.ref_cnt < uses[block.block_id]:
            raise InvariantError(
                f"block {block.block_id} is in {uses[block.block_id]} block tables, and counted {block.ref_cnt} times"
            )
        if (block.ref_cnt == 0) != (block.block_id in is_free):
            where = "in" if block.block_id in is_free else "missing from"
            raise InvariantError(f"block {block.block_id} is used {block.ref_cnt} times and {where} the free queue")


def check_idle(scheduler: Any) -> None:
    """Check that nothing is left once all requests are finished.

    Raises:
        InvariantError: A request, or a block that nobody has given back, is.
    """
    if scheduler.requests:
        raise InvariantError(f"requests are left: {sorted(scheduler.requests)}")
    if scheduler.running or len(scheduler.waiting):
        raise InvariantError("queues aren't empty, though there are no requests")
    pool = scheduler.kv_cache_manager.block_pool
    held = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
    if held or pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        raise InvariantError(f"no request is left, and blocks {held} are still in use")


class CacheAudit:
    """What each block of the prefix cache should hold, noted as requests are scheduled."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[int, TokenSequence, int]] = {}
        # Blocks of requests with a load that failed, each with the token after its last one.
        self._not_loaded: dict[str, dict[int, int]] = {}

    def not_loaded(self, request_id: str, tables: Iterable[tuple[int, Iterable[Any]]]) -> None:
        """Note that a load failed, and vLLM knows: until they are computed, the request's blocks may hold anything.

        Args:
            request_id: The request.
            tables: Its blocks by group, each with the group's block size.
        """
        self._not_loaded[request_id] = {
            block.block_id: (index + 1) * size for size, blocks in tables for index, block in enumerate(blocks)
        }

    def note(
        self, request_id: str, sequence: TokenSequence, tables: Iterable[Iterable[Any]], num_computed: int
    ) -> None:
        """Note what a request's blocks hold, or will hold when they are full.

        Args:
            request_id: The request.
            sequence: Its tokens.
            tables: Its blocks by group.
            num_computed: Tokens that are computed at the end of this step.
        """
        if blocks := self._not_loaded.get(request_id):
            self._not_loaded[request_id] = {block: end for block, end in blocks.items() if end > num_computed}
        for group, table in enumerate(tables):
            for index, block in enumerate(table):
                if not block.is_null:
                    self._contents[block.block_id] = (group, sequence, index)

    def copy(self, copies: Iterable[Any]) -> None:
        """Note copies of blocks: a cached one that its request goes on writing to leaves a copy behind."""
        noted = [(copy.dst_block_id, self._contents.get(copy.src_block_id)) for copy in copies]
        for block_id, contents in noted:
            if contents is not None:
                self._contents[block_id] = contents

    def check(self, scheduler: Any, layers: Iterable[Layer]) -> None:
        """Check every block that vLLM would let another request read.

        Blocks of failed loads are left out while their request is there to compute them: vLLM keeps them cached.

        Raises:
            WrongKVError: One of them holds something else than its hash says.
        """
        self._not_loaded = {
            request_id: blocks
            for request_id, blocks in self._not_loaded.items()
            if blocks and request_id in scheduler.requests
        }
        exempt = {block_id for blocks in self._not_loaded.values() for block_id in blocks}
        by_group: dict[int, list[Layer]] = {}
        for layer in layers:
            by_group.setdefault(layer.group, []).append(layer)
        for block in scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is None or block.block_id not in self._contents or block.block_id in exempt:
                continue
            group, sequence, index = self._contents[block.block_id]
            # A block may be cached before it is full, where groups have blocks of several sizes.
            covered = getattr(block, "block_hash_num_tokens", None)
            for layer in by_group.get(group, ()):
                end = covered or (index + 1) * layer.block_size
                if layer.is_state:
                    layer.verify_state("", sequence, block.block_id, end)
                else:
                    table = np.full(index + 1, block.block_id)
                    layer.verify_tokens("", sequence, table, index * layer.block_size, end)
