"""Reads a module's source through its loader, and puts patched source where tracebacks look."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvplug_hooks.errors import PatchError
from kvplug_hooks.source import SourceText
from kvplug_hooks.versions import public_version

if TYPE_CHECKING:
    from packaging.version import Version

__all__ = ["loaded_version", "read_source", "remember_lines"]


def read_source(loader: Any, name: str, origin: str | None) -> SourceText:
    """Return the source of a module, whatever loads it.

    Args:
        loader: The module's loader.
        name: The module's dotted name.
        origin: Its file, if it has one.

    Raises:
        PatchError: There is no Python source.

    """
    if origin is not None and origin.endswith(".py") and hasattr(loader, "get_data"):
        return SourceText.from_bytes(loader.get_data(origin))
    text = loader.get_source(name) if hasattr(loader, "get_source") else None
    if text is None:
        raise PatchError(f"{origin or name} has no Python source; install a vLLM that has.")
    return SourceText(text)


def remember_lines(filename: str, source: SourceText) -> str:
    """Have tracebacks and `inspect` show this source for a file, and return it as they show it."""
    import io
    import linecache

    # With the line endings that linecache gives the lines of a file.
    lines = io.StringIO(source.text, newline=None).readlines()
    text = "".join(lines)
    # No modification time: linecache then never checks the entry against the file.
    linecache.cache[filename] = (len(text), None, lines, filename)
    return text


def loaded_version() -> Version | None:
    """Return the version of the vLLM that is loaded in this process, if it says."""
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    return public_version(version) if isinstance(version, str) else None
