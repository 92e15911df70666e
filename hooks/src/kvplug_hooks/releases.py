"""The patch for vLLM releases that aren't installed: hunks recorded from their sources.

`scripts/record_releases.py` writes them.
"""

from __future__ import annotations

import json
from importlib.resources import files

from kvplug_hooks.diff import Hunk

__all__ = ["FILE_NAME", "dump", "recorded"]

#: The data file in this package.
FILE_NAME = "releases.json"

#: Release: patch id: hunks.
Record = dict[str, dict[str, tuple[Hunk, ...]]]


def recorded() -> Record:
    """Return the hunks of every recorded release, by release and patch id."""
    content = json.loads((files("kvplug_hooks") / "data" / FILE_NAME).read_text("utf-8"))
    return {
        release: {
            patch_id: tuple(Hunk(hunk["line"], tuple(hunk["lines"])) for hunk in hunks)
            for patch_id, hunks in patches.items()
        }
        for release, patches in content.items()
    }


def dump(record: Record) -> str:
    """Return the data file's text."""
    content = {
        release: {
            patch_id: [{"line": hunk.line, "lines": hunk.lines} for hunk in hunks]
            for patch_id, hunks in patches.items()
        }
        for release, patches in record.items()
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
