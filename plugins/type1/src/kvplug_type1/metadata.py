"""What the scheduler half tells the worker half in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

__all__ = ["LoadRequest", "SaveRequest", "Type1Metadata"]


@dataclass(frozen=True)
class LoadRequest:
    """Blocks of one request that may be loaded in this step, in order and without gaps."""

    request_id: str
    #: Tokens already computed. They may end inside the first block, which is loaded whole.
    num_computed_tokens: int
    #: Tokens covered up to the start of the first block.
    first_token: int
    #: Keys of the blocks, 32 bytes each.
    keys: tuple[bytes, ...]
    #: Where the blocks go in the paged cache, as many as keys.
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class SaveRequest:
    """Blocks of one request that are full, and their KV computed, when this step ends."""

    request_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Type1Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step of type1."""

    #: Ids of the requests in `loads`: those that the hook may answer for (see `kvplug.hookspecs`).
    candidates: tuple[str, ...] = ()
    loads: tuple[LoadRequest, ...] = ()
    saves: tuple[SaveRequest, ...] = ()
    #: Rises when everything stored so far must be forgotten.
    reset_count: int = field(default=0)
