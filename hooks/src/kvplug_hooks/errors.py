"""What kvplug-hooks refuses, and why."""

from __future__ import annotations

from kvplug.errors import UnsupportedError

__all__ = ["PatchError"]


class PatchError(UnsupportedError):
    """A patch can't be placed exactly where it belongs, or isn't known for the vLLM release that was asked for."""
