"""Steps of a made-up scheduler for type1's scheduler half."""

from __future__ import annotations

from typing import Any

from kvplug.kv_groups import KVGroup
from kvplug_type1.metadata import Type1Metadata
from kvplug_type1.scheduler import Type1Scheduler
from support.made_up_steps import Request, Table, output

__all__ = ["BLOCK", "Request", "full", "make", "output", "start", "window"]

#: Tokens per block.
BLOCK = 4


def full(index: int = 0, *, block_size: int = BLOCK, pages: dict[str, int] | None = None) -> KVGroup:
    """Describe a KV-cache group of full attention; `pages` are bytes of a block by layer."""
    return KVGroup(index, "full", block_size, 0, every_block=False, page_size_bytes=pages or {})


def window(index: int = 0, tokens: int = 8, *, block_size: int = BLOCK, pages: dict[str, int] | None = None) -> KVGroup:
    """Describe a KV-cache group with a sliding window of so many tokens."""
    return KVGroup(index, "window", block_size, tokens, every_block=False, page_size_bytes=pages or {})


def make(*groups: KVGroup, windowed: bool = False) -> Type1Scheduler:
    """Make a scheduler half without requests."""
    return Type1Scheduler(namespace=bytes(32), groups=groups or [window() if windowed else full()])


def start(
    scheduler: Type1Scheduler,
    request: Request,
    blocks: Table,
    *,
    scheduled: int | None = None,
    computed: int = 0,
    local: int | None = None,
    **flags: Any,
) -> Type1Metadata:
    """Take a request through vLLM's lookup and its first step."""
    scheduler.track(request, computed if local is None else local)
    scheduler.track(request)
    scheduled = len(request.all_token_ids) - computed if scheduled is None else scheduled
    return scheduler.build_metadata(
        output({request.request_id: scheduled}, new=[(request.request_id, computed, blocks)], **flags)
    )
