"""In which vLLM releases, and on which of their model runners, the hook was shown to work.

`make matrix` writes the data file. For each release it reads the sources: the hook's place must be there exactly once,
everything that kvplug relies on must be as it is declared, and the patched `execute_model` is run, up to its state
update, with stand-ins for what it needs beyond that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from typing import Any

__all__ = ["FILE_NAME", "Matrix", "Row", "dump", "recorded"]

#: The data file in this package.
FILE_NAME = "matrix.json"


@dataclass(frozen=True)
class Row:
    """What was found for one model runner of one release."""

    release: str
    #: `v1` or `v2`.
    runner: str
    #: How many places the hook could go to.
    anchor_count: int
    #: Lines that the patch adds to the file; nothing else changes.
    added_lines: int
    #: Whether everything that kvplug relies on is as it is declared for the release.
    contract: bool
    #: Whether the patched method ran and did what it should.
    runs: bool
    #: What is wrong, if something is.
    reason: str = ""

    @property
    def supported(self) -> bool:
        """Whether the hook works there."""
        return self.anchor_count == 1 and self.contract and self.runs

    def as_json(self) -> dict[str, Any]:
        """Return it as a dict for JSON; `reason` is there only if it isn't supported."""
        return {
            "release": self.release,
            "runner": self.runner,
            "anchor_count": self.anchor_count,
            "added_lines": self.added_lines,
            "contract": self.contract,
            "runs": self.runs,
            "supported": self.supported,
            **({} if self.supported else {"reason": self.reason}),
        }


@dataclass(frozen=True)
class Matrix:
    """All rows, and the day on which they were found."""

    day: date
    rows: tuple[Row, ...]


def recorded() -> Matrix:
    """Return what `make matrix` found last."""
    content = json.loads((files("kvplug_hooks") / "data" / FILE_NAME).read_text("utf-8"))
    rows = [{key: value for key, value in row.items() if key != "supported"} for row in content["rows"]]
    return Matrix(date.fromisoformat(content["date"]), tuple(Row(**row) for row in rows))


def dump(day: date, rows: Iterable[Row]) -> str:
    """Return the data file's text."""
    content = {"date": day.isoformat(), "rows": [row.as_json() for row in rows]}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
