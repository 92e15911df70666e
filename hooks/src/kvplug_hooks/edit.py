"""Puts patches into a source text, exactly, or refuses.

There are two styles. `inline` is for modules patched in memory: everything goes on lines that exist, so that no line
number moves. `lines` is for files and diffs: each import and each call is a line of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Literal

from kvplug_hooks.errors import PatchError
from kvplug_hooks.sites import Parsed, Site, refusal, survey, without_conflicts
from kvplug_hooks.source import SourceText

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["Edit", "Insertion", "Style", "code_of", "inline", "insert", "lines"]

Style = Literal["inline", "lines"]


@dataclass(frozen=True)
class Insertion:
    """Text that goes into the original at `offset`, which is on the 1-based line `line`."""

    offset: int
    line: int
    text: str


@dataclass(frozen=True)
class Edit:
    """A verified edit: without its insertions, `result` is `original` to the byte."""

    original: SourceText
    #: In the order of the text.
    insertions: tuple[Insertion, ...]
    result: SourceText
    #: The result, compiled.
    code: CodeType


def inline(source: SourceText, patch: Patch, filename: str) -> Edit | None:
    """Insert one patch without adding a line.

    Args:
        source: The module's source.
        patch: What to insert.
        filename: The file name that the code object gets.

    Returns:
        The edit, or None if the function makes the call already.

    Raises:
        PatchError: The patch has no exact place in this source.

    """
    return _one(source, patch, "inline", filename)


def lines(source: SourceText, patch: Patch, filename: str) -> Edit | None:
    """Insert one patch as two lines: the import after the module's own imports, the call before its anchor.

    Arguments, result and errors are those of `inline`.
    """
    return _one(source, patch, "lines", filename)


def insert(parsed: Parsed, sites: Sequence[Site], style: Style, filename: str) -> Edit:
    """Insert the patches of all `sites`, which must fit, into one module.

    Raises:
        PatchError: One of them doesn't fit after all, or the result isn't what was promised.

    """
    for site in without_conflicts(sites, parsed.path):
        if site.state != "fits":
            raise PatchError(site.reason)
    return _apply(parsed, sites, _insertions(parsed, sites, style), style, filename)


def _one(source: SourceText, patch: Patch, style: Style, filename: str) -> Edit | None:
    parsed, (site,) = survey(source, patch.path, [patch])
    if site.state == "already in source":
        return None
    if parsed is None or site.state != "fits":
        raise PatchError(site.reason)
    return insert(parsed, [site], style, filename)


def _insertions(parsed: Parsed, sites: Sequence[Site], style: Style) -> tuple[Insertion, ...]:
    source, last = parsed.source, parsed.last_import
    assert last is not None, "no site fits a module without imports"
    line, column = last.end_lineno or last.lineno, last.end_col_offset or 0
    # Patches that share an import get it once.
    imports = list(dict.fromkeys(site.patch.import_line for site in sites))
    if style == "inline":
        at_import = Insertion(source.offset(line, column), line, "".join(f"; {text}" for text in imports))
    else:
        rest = source.text[source.offset(line, column) : source.offset(line + 1, 0)]
        if rest.strip() and not rest.lstrip().startswith("#"):
            raise refusal(sites[0].patch, parsed.path, "its last import shares a line with other code")
        ending = _line_ending(source.lines[line - 1])
        at_import = Insertion(source.offset(line + 1, 0), line + 1, "".join(text + ending for text in imports))
    calls = [_call(parsed, site, style) for site in sites]
    return (at_import, *sorted(calls, key=lambda insertion: insertion.offset))


def _call(parsed: Parsed, site: Site, style: Style) -> Insertion:
    source, anchor, call = parsed.source, site.anchor, site.patch.call
    assert anchor is not None, "a site that fits has an anchor"
    if style == "inline":
        return Insertion(source.offset(anchor.lineno, anchor.col_offset), anchor.lineno, f"{call}; ")
    line = source.lines[anchor.lineno - 1]
    indent = line.encode()[: anchor.col_offset].decode()
    if indent.strip():
        raise refusal(site.patch, parsed.path, f"the statement at {site.patch.anchor} doesn't begin its line")
    return Insertion(source.offset(anchor.lineno, 0), anchor.lineno, indent + call + _line_ending(line))


def _line_ending(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]


def _apply(parsed: Parsed, sites: Sequence[Site], insertions: Sequence[Insertion], style: Style, filename: str) -> Edit:
    """Insert, and check what was promised: nothing else changed, and each call is in its function."""
    source, patch = parsed.source, sites[0].patch
    text = source.text
    for insertion in reversed(insertions):
        text = text[: insertion.offset] + insertion.text + text[insertion.offset :]
    result = SourceText(text, source.encoding)

    stripped = text
    for insertion in insertions:
        if insertion.text in source.text:
            raise refusal(patch, parsed.path, f"it has the text `{insertion.text.strip()}` already")
        stripped = stripped[: insertion.offset] + stripped[insertion.offset :].replace(insertion.text, "", 1)
    if SourceText(stripped, source.encoding).data != source.data:
        raise refusal(patch, parsed.path, "taking the inserted text out again doesn't restore the original")
    added = len(result.lines) - len(source.lines)
    expected = 0 if style == "inline" else len({site.patch.import_line for site in sites}) + len(sites)
    if added != expected:
        raise refusal(patch, parsed.path, f"the edit adds {added} lines instead of {expected}")
    try:
        code = compile(text, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise refusal(patch, parsed.path, f"the result doesn't compile ({error})") from error
    for site in sites:
        name = site.patch.import_name
        if name not in code.co_names or name not in code_of(code, site.patch, parsed.path).co_names:
            raise refusal(site.patch, parsed.path, f"the result doesn't call {name} in {site.patch.function}")
    return Edit(source, tuple(insertions), result, code)


def code_of(module: CodeType, patch: Patch, path: str) -> CodeType:
    """Return the code of the function that a patch is for, of a compiled module.

    Raises:
        PatchError: There is no such function, or there are several.

    """
    code = module
    for name in patch.function.split("."):
        found = [const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name]
        if len(found) != 1:
            raise refusal(patch, path, f"the compiled result has {name} {len(found)} times instead of once")
        code = found[0]
    return code
