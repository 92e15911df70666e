"""A patch as a unified diff that `patch -p1` and `git apply` take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplug_hooks.errors import PatchError
from kvplug_hooks.source import SourceText

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvplug_hooks.edit import Edit, Insertion

__all__ = ["Hunk", "hunks", "render"]

_CONTEXT = 3
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True)
class Hunk:
    """One hunk of a diff that only adds lines."""

    #: The 1-based line of the original at which the hunk begins.
    line: int
    #: The hunk's lines as in the diff, each with its marker and without its newline.
    lines: tuple[str, ...]

    @property
    def added(self) -> int:
        """The number of lines that the hunk adds."""
        return sum(line.startswith("+") for line in self.lines)

    @property
    def kept(self) -> int:
        """The number of lines of the original that the hunk shows."""
        return sum(line.startswith(" ") for line in self.lines)


def hunks(edit: Edit) -> tuple[Hunk, ...]:
    """Return the hunks of an edit of the style `lines`, with three lines of context, as `diff -u` has them.

    Raises:
        PatchError: The source can't be shown in a diff: it isn't UTF-8, or has bare carriage returns.

    """
    source = edit.original.lines
    if edit.original.encoding != "utf-8" or any(line.endswith("\r") for line in source):
        raise PatchError("Only UTF-8 sources with ordinary line endings can be put into a diff; reinstall vLLM.")
    return tuple(_hunk(source, group) for group in _groups(edit.insertions))


def render(path: str, hunks: Iterable[Hunk]) -> str:
    """Return the diff of one file, with `path` below `a/` and `b/`."""
    parts = [f"--- a/{path}\n+++ b/{path}\n"]
    shift = 0
    for hunk in hunks:
        parts.append(f"@@ -{hunk.line},{hunk.kept} +{hunk.line + shift},{hunk.kept + hunk.added} @@\n")
        parts += [f"{line}\n" for line in hunk.lines]
        shift += hunk.added
    return "".join(parts)


def _groups(insertions: Iterable[Insertion]) -> list[list[Insertion]]:
    """Group the insertions whose contexts touch: they share a hunk."""
    groups: list[list[Insertion]] = []
    for insertion in insertions:
        if groups and insertion.line - groups[-1][-1].line <= 2 * _CONTEXT:
            groups[-1].append(insertion)
        else:
            groups.append([insertion])
    return groups


def _hunk(source: list[str], group: list[Insertion]) -> Hunk:
    start = max(group[0].line - _CONTEXT, 1)
    end = min(group[-1].line - 1 + _CONTEXT, len(source))
    added = {insertion.line: SourceText(insertion.text).lines for insertion in group}
    lines: list[str] = []
    for number in range(start, end + 1):
        lines += ["+" + text.removesuffix("\n") for text in added.get(number, ())]
        line = source[number - 1]
        lines.append(" " + line.removesuffix("\n"))
        if not line.endswith("\n"):
            lines.append(_NO_NEWLINE)
    return Hunk(start, tuple(lines))
