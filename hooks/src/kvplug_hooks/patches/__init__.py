"""The patches that this distribution knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplug_hooks.patches import before_update_states

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["all_patches"]


def all_patches() -> tuple[Patch, ...]:
    """Return every declared patch."""
    return before_update_states.PATCHES
