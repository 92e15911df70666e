"""Settings of type2."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvplug.store.settings import StoreSettings

__all__ = ["Type2Settings"]


class Type2Settings(StoreSettings):
    """Settings of the block store, and of how type2 transfers blocks."""

    transfer: Literal["between_steps", "layerwise"] = Field(
        default="between_steps",
        description="When blocks are loaded and saved: `between_steps`, while others are computed (the request is put "
        "aside until its blocks are there), or `layerwise`, a layer's blocks while the layers before it are computed.",
    )
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
    def slab_sized_by(self) -> tuple[int, bool]:
        """What decides the slots of a worker, for one model: bytes of L1 per rank, and whether there are L2 tiers."""
        return self.l1_size_per_rank, bool(self.tiers)
