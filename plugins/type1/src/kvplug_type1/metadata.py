"""What the two halves tell each other in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvplug import compat

__all__ = ["Announcement", "LoadRequest", "SaveRequest", "Type1Metadata", "Type1WorkerMetadata"]

if TYPE_CHECKING:
    _WorkerMetadata = object
else:
    # What vLLM doesn't have before 0.18.1 it doesn't ask for either.
    _WorkerMetadata = compat.worker_metadata_class() or object


@dataclass(frozen=True)
class Announcement:
    """A request that waits for its turn, with the keys of its full blocks, in the order of `BlockOrder`."""

    request_id: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class LoadRequest:
    """Blocks of one request that may be loaded in this step, in the order of `BlockOrder` and without gaps."""

    request_id: str
    #: Tokens already computed. They may end inside the first block of a group, which is loaded whole.
    num_computed_tokens: int
    #: Keys of the blocks.
    keys: tuple[bytes, ...]
    #: Where the blocks go in the paged cache, as many as keys.
    block_ids: tuple[int, ...]
    #: KV-cache group of each block, as many as keys; none if there is only one group.
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class SaveRequest:
    """Blocks of one request, in one KV-cache group, that are full, and their KV computed, when this step ends."""

    request_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    group: int = 0


@dataclass(frozen=True)
class Type1Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step of type1."""

    #: Ids of the requests in `loads`: those that the hook may answer for (see `kvplug.hookspecs`).
    candidates: tuple[str, ...] = ()
    loads: tuple[LoadRequest, ...] = ()
    saves: tuple[SaveRequest, ...] = ()
    #: Requests that aren't scheduled in this step and will want their blocks soon.
    announced: tuple[Announcement, ...] = ()
    #: Rises when everything stored so far must be forgotten.
    reset_count: int = field(default=0)


@dataclass
class Type1WorkerMetadata(_WorkerMetadata):
    """What came of a step's loads, from the workers to the scheduler half."""

    #: Tokens that didn't have to be computed, by request id; only requests that have any.
    skipped: Mapping[str, int]

    def aggregate(self, other: Any) -> Type1WorkerMetadata:
        """Merge with another rank's. Ranks have agreed, so a request that one of them doesn't name has none."""
        return Type1WorkerMetadata(
            {name: min(count, other.skipped[name]) for name, count in self.skipped.items() if name in other.skipped}
        )
