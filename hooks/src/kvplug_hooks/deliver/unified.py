"""The difference of two files as a unified diff that `patch -p1` takes."""

from __future__ import annotations

import difflib

from kvplug_hooks.deliver.manifest import split_lines

__all__ = ["unified"]

_NO_NEWLINE = b"\n\\ No newline at end of file\n"


def unified(name: str, before: bytes, after: bytes) -> bytes:
    """Return the diff of one file, with `name` below `a/` and `b/`; nothing if there is none."""
    old, new = f"a/{name}".encode(), f"b/{name}".encode()
    lines = difflib.diff_bytes(difflib.unified_diff, split_lines(before), split_lines(after), old, new)
    return b"".join(line if line.endswith(b"\n") else line + _NO_NEWLINE for line in lines)
