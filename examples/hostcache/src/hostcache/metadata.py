"""What the scheduler half tells the workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class HostCacheMetadata(KVConnectorMetadata):
    """One step, as far as full blocks are concerned."""

    #: By request, the keys of the blocks that are full when this step ends and weren't when it starts.
    filled: dict[str, list[bytes]]
    #: By request that was preempted since the last step, the keys of its full blocks from the first one on.
    preempted: dict[str, list[bytes]]

    @property
    def candidates(self) -> list[str]:
        """Requests that the hook may answer for. The same on all tensor-parallel ranks."""
        return list(self.filled)
