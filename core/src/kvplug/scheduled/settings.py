"""Settings of connectors that decide on the scheduler."""

from __future__ import annotations

from pydantic import Field

from kvplug.store.settings import StoreSettings

__all__ = ["ScheduledSettings"]


class ScheduledSettings(StoreSettings):
    """Settings of the block store, and of how blocks are transferred."""

    save_within_step: bool = Field(
        default=False,
        description="Whether a step ends only when its blocks are saved. If not, they are saved while the next steps "
        "run, and a step that is about to overwrite one of them waits for it.",
    )
    max_parked_requests: int = Field(
        default=16,
        ge=0,
        examples=[16],
        description="Waiting requests that are held back at the same time until their blocks have come from L2, each "
        "for at most `l2_load_timeout`. Beyond that, requests start with what L1 has.",
    )

    @property
    def layerwise(self) -> bool:
        """Whether blocks are loaded and saved layer by layer within a step, instead of between steps."""
        return False

    @property
    def peers(self) -> tuple[tuple[int, int], ...]:
        """Tensor- and pipeline-parallel sizes of engines whose blocks are found, too, one's own maybe among them."""
        return ()

    @property
    def slab_sized_by(self) -> tuple[str, int, bool]:
        """What decides the slots of a worker, for one model: whose they are, bytes of L1 per rank, whether there is L2.

        Under `MultiConnector`, a scheduler half may be told of another connector's slots.
        """
        return type(self).__name__, self.l1_size_per_rank, bool(self.tiers)
