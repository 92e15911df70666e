"""The parts of a module's syntax tree that patches look at, without parsing the rest.

Parsing the first model runner's 7,000 lines takes as long as compiling them, and a worker waits for it. What is needed
is the import block and one function. The text is cut where a line begins in a column at which that part can't go on.
If it parses, the cut was right: inside a string or brackets, or after a backslash, it would be a syntax error. Whether
the part is what it seems to be is checked after the whole text has been compiled (`kvplug_hooks.edit`): the inserted
call must be in the function's code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvplug_hooks.sites import Parsed

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch
    from kvplug_hooks.source import SourceText

__all__ = ["mentions_function", "outline", "outline_text"]

_IMPORT = re.compile(r"(?:import|from)\s")
#: A line that ends a block of imports, unless it is in a docstring.
_OTHER = re.compile(r"(?:class|def|async|if|try|for|while|with)\b|@|[A-Za-z_]\w*\s*[:=\[.(]")
_CLOSING = ")]}"


def mentions_function(text: str, patch: Patch) -> bool:
    """Return whether a text may define the function that a patch is for; False is certain."""
    return re.search(rf"\bdef\s+{patch.function.rpartition('.')[2]}\b", text) is not None


def outline(source: SourceText, path: str, patches: Iterable[Patch]) -> Parsed | None:
    """Return a module with only its leading imports and the patched functions in its syntax tree.

    Line numbers and columns are those of the whole text. What `patches` insert must not be in it yet.

    Returns:
        The module, or None if it isn't as plain as that: then all of it must be parsed.

    """
    text = outline_text(source, patches)
    try:
        return None if text is None else Parsed(source, path, ast.parse(text))
    except (SyntaxError, ValueError):
        return None


def outline_text(source: SourceText, patches: Iterable[Patch]) -> str | None:
    """Return a module's text with nothing but the leading imports and the patched functions, each on its lines."""
    lines = source.lines
    keep = [""] * len(lines)
    end = _end_of_imports(lines)
    if end is None:
        return None
    keep[:end] = lines[:end]
    if not all(_keep_function(lines, keep, patch.function.split(".")) for patch in patches):
        return None
    return "".join(line or "\n" for line in keep)


def _end_of_imports(lines: Sequence[str]) -> int | None:
    """Return the number of lines up to the first that is certainly behind the leading imports."""
    seen = False
    for number, line in enumerate(lines):
        if _IMPORT.match(line):
            seen = True
        elif seen and _OTHER.match(line):
            return number
    return len(lines) if seen else None


def _keep_function(lines: Sequence[str], keep: list[str], names: Sequence[str]) -> bool:
    """Copy a function's lines, and a line for its class, from `lines` to `keep`; return whether it was found once."""
    start, end = 0, len(lines)
    if len(names) > 2:  # noqa: PLR2004 - a class and its method
        return False
    if len(names) > 1:
        found = _starts(lines, rf"class\s+{names[0]}\b", start, end)
        if len(found) != 1:
            return False
        start, end = found[0], _end_of_block(lines, found[0])
        # The header may be many lines, and what the bases are doesn't matter.
        keep[start] = f"class {names[0]}:\n"
    indent = r"[ \t]+" if len(names) > 1 else ""
    found = _starts(lines, rf"{indent}(?:async\s+)?def\s+{names[-1]}\b", start, end)
    if len(found) != 1:
        return False
    start, end = found[0], _end_of_block(lines, found[0])
    keep[start:end] = lines[start:end]
    return True


def _starts(lines: Sequence[str], pattern: str, start: int, end: int) -> list[int]:
    compiled = re.compile(pattern)
    return [number for number in range(start, end) if compiled.match(lines[number])]


def _end_of_block(lines: Sequence[str], start: int) -> int:
    """Return the line before which the block of the statement at `start` ends, if no string or bracket is open."""
    indent = _indent(lines[start])
    for number in range(start + 1, len(lines)):
        stripped = lines[number].strip()
        if stripped and stripped[0] != "#" and stripped[0] not in _CLOSING and _indent(lines[number]) <= indent:
            return number
    return len(lines)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
