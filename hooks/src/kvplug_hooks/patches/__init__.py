"""The patches that this distribution declares: each module here has some, in `PATCHES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["all_patches"]


def all_patches() -> tuple[Patch, ...]:
    """Return every patch that this distribution declares."""
    from kvplug_hooks.registry import own_patches

    return own_patches()
