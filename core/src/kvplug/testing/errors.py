"""What a simulation raises when a connector, or vLLM, does something wrong."""

from __future__ import annotations

from kvplug.errors import KvplugError

__all__ = ["InvariantError", "SimulationError", "StuckError", "WrongKVError"]


class SimulationError(KvplugError, AssertionError):
    """Base of what a simulation finds."""


class WrongKVError(SimulationError):
    """A request would read, through its own block table, KV that isn't its own.

    Attributes:
        request_id: The request, or "" where a cached block belongs to no running one.
        group: KV-cache group of the layer.
        layer: Name of the layer.
        rank: The worker's rank.
        position: First wrong token position.
        block_id: The block that should have held it; None where the block table ends before it.
    """

    def __init__(
        self, request_id: str, *, group: int, layer: str, rank: int, position: int, block_id: int | None, found: str
    ) -> None:
        self.request_id, self.group, self.layer, self.rank = request_id, group, layer, rank
        self.position, self.block_id, self.found = position, block_id, found
        who = f"request {request_id!r}" if request_id else "the prefix cache"
        super().__init__(
            f"{who} has wrong KV at position {position}, in block {block_id} of group {group} "
            f"(layer {layer!r}, rank {rank}): {found}"
        )


class InvariantError(SimulationError):
    """vLLM's bookkeeping of blocks and requests no longer adds up, or a request got a wrong token."""


class StuckError(SimulationError):
    """Requests are unfinished, and no number of further steps seems to change it."""
