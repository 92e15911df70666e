"""What kvplug-hooks refuses, and why."""

from __future__ import annotations

try:
    from kvplug.errors import UnsupportedError
except ModuleNotFoundError:
    # kvplug was uninstalled. A vLLM whose files are patched doesn't start then, and `kvplug-hooks revert` must work.
    class UnsupportedError(RuntimeError):  # type: ignore[no-redef]
        """Stands in for kvplug's."""


__all__ = ["PatchError", "UnsupportedError"]


class PatchError(UnsupportedError):
    """A patch can't be placed exactly where it belongs, or isn't known for the vLLM release that was asked for."""
