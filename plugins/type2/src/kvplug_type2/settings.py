"""Settings of type2."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvplug.scheduled.settings import ScheduledSettings

__all__ = ["Type2Settings"]


class Type2Settings(ScheduledSettings):
    """Settings of the block store, and of how type2 transfers blocks."""

    transfer: Literal["between_steps", "layerwise"] = Field(
        default="between_steps",
        description="When blocks are loaded and saved: `between_steps`, while others are computed (the request is put "
        "aside until its blocks are there), or `layerwise`, a layer's blocks while the layers before it are computed.",
    )

    @property
    def layerwise(self) -> bool:
        """Whether blocks are loaded and saved layer by layer within a step, instead of between steps."""
        return self.transfer == "layerwise"
