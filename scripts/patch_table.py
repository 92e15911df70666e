"""Write the table of docs/patches.md: what each patch comes to in each vLLM release that was read.

The table comes from the patches' declarations and from what `record_releases.py` recorded.

    python scripts/patch_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from kvplug_hooks import releases
from kvplug_hooks.patches import all_patches
from kvplug_hooks.releases import Record, Recorded

PAGE = Path(__file__).resolve().parents[1] / "docs" / "patches.md"
_MARKED = re.compile(r"(<!-- written by scripts/patch_table\.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)

#: From which release on which model runner is vLLM's default on GPUs, from its `VllmConfig.use_v2_model_runner`.
DEFAULT_RUNNERS = (
    ("0.14", "V1"),
    ("0.22", "V1; V2 for dense Qwen3"),
    ("0.23", "V1; V2 for dense Qwen3, Llama, Mistral"),
    ("0.24", "V1; V2 for a list of models"),
    ("0.25", "V2 for dense models; else V1"),
    ("0.29", "V2"),
)


def main() -> None:
    """Write the page with the table as it is to be."""
    PAGE.write_text(updated(PAGE.read_text("utf-8"), releases.recorded()), "utf-8")


def updated(page: str, record: Record) -> str:
    """Return a page's text with the table between its marks."""
    assert len(_MARKED.findall(page)) == 1, "the page has one place for the table"
    return _MARKED.sub(lambda match: match[1] + table(record) + match[3], page)


def table(record: Record) -> str:
    """Return the table in Markdown."""
    ids = [patch.id for patch in all_patches()]
    rows = [("vLLM", "Default runner", *(f"`{patch_id}`" for patch_id in ids))]
    rows += [
        (release, _default_runner(release), *(_cell(entries.get(patch_id)) for patch_id in ids))
        for release, entries in record.items()
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def _default_runner(release: str) -> str:
    return [runner for first, runner in DEFAULT_RUNNERS if Version(first) <= Version(release)][-1]


def _cell(entry: Recorded | None) -> str:
    if entry is None:
        return "not read"
    return f"needed: {entry.added_lines} lines" if entry.state == "fits" else entry.state


if __name__ == "__main__":
    main()
