"""What the patches come to in vLLM releases that aren't installed, recorded from their sources.

`scripts/record_releases.py` writes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from kvplug_hooks.diff import Hunk

if TYPE_CHECKING:
    from kvplug_hooks.sites import State

__all__ = ["FILE_NAME", "Record", "Recorded", "dump", "recorded"]

#: The data file in this package.
FILE_NAME = "releases.json"


@dataclass(frozen=True)
class Recorded:
    """What a patch comes to in a release."""

    state: State
    #: The file that has the function, or that should, relative to the folder that contains the `vllm` package.
    path: str
    #: Why it doesn't fit; empty if it does.
    reason: str = ""
    #: The patch as a diff of that file; empty if it doesn't fit.
    hunks: tuple[Hunk, ...] = ()

    @property
    def added_lines(self) -> int:
        """The number of lines that the patch adds."""
        return sum(hunk.added for hunk in self.hunks)


#: Release: patch id: what it comes to.
Record = dict[str, dict[str, Recorded]]


def recorded() -> Record:
    """Return what is recorded, by release and patch id."""
    content = json.loads((files("kvplug_hooks") / "data" / FILE_NAME).read_text("utf-8"))
    return {
        release: {patch_id: _recorded(**entry) for patch_id, entry in patches.items()}
        for release, patches in content.items()
    }


def dump(record: Record) -> str:
    """Return the data file's text."""
    content = {
        release: {patch_id: asdict(entry) for patch_id, entry in patches.items()} for release, patches in record.items()
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _recorded(state: State, path: str, reason: str, hunks: list[dict[str, object]]) -> Recorded:
    return Recorded(state, path, reason, tuple(_hunk(**hunk) for hunk in hunks))  # type: ignore[arg-type]


def _hunk(line: int, lines: list[str]) -> Hunk:
    return Hunk(line, tuple(lines))
