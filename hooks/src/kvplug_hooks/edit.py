"""Puts a patch into a source text, exactly, or refuses.

There are two styles. `inline` is for modules patched in memory: everything goes on lines that exist, so that no line
number moves. `lines` is for files and diffs: the import and the call are lines of their own.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

from kvplug_hooks.errors import PatchError
from kvplug_hooks.source import SourceText

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["Edit", "Insertion", "inline", "lines"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef


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


@dataclass(frozen=True)
class _Site:
    #: The last statement of the leading import block.
    last_import: ast.stmt
    #: The statement before which the call goes.
    anchor: ast.stmt


def inline(source: SourceText, patch: Patch, filename: str) -> Edit | None:
    """Insert the patch without adding a line.

    Args:
        source: The module's source.
        patch: What to insert.
        filename: The file name that the code object gets.

    Returns:
        The edit, or None if the function makes the call already.

    Raises:
        PatchError: The patch has no exact place in this source.

    """
    site = _locate(source, patch)
    if site is None:
        return None
    last, anchor = site.last_import, site.anchor
    import_line, import_column = last.end_lineno or last.lineno, last.end_col_offset or 0
    return _apply(
        source,
        patch,
        (
            Insertion(source.offset(import_line, import_column), import_line, f"; {patch.import_line}"),
            Insertion(source.offset(anchor.lineno, anchor.col_offset), anchor.lineno, f"{patch.call}; "),
        ),
        filename=filename,
        added_lines=0,
    )


def lines(source: SourceText, patch: Patch, filename: str) -> Edit | None:
    """Insert the patch as two lines: the import after the module's own imports, the call before its anchor.

    Arguments, result and errors are those of `inline`.
    """
    site = _locate(source, patch)
    if site is None:
        return None
    last, anchor = site.last_import, site.anchor
    import_line = last.end_lineno or last.lineno
    rest = source.text[source.offset(import_line, last.end_col_offset or 0) : source.offset(import_line + 1, 0)]
    if rest.strip() and not rest.lstrip().startswith("#"):
        raise _refusal(patch, "its last import shares a line with other code")
    line_of_anchor = source.lines[anchor.lineno - 1]
    indent = line_of_anchor.encode()[: anchor.col_offset].decode()
    if indent.strip():
        raise _refusal(patch, f"the statement at {patch.anchor} doesn't begin its line")
    return _apply(
        source,
        patch,
        (
            Insertion(
                source.offset(import_line + 1, 0),
                import_line + 1,
                patch.import_line + _line_ending(source.lines[import_line - 1]),
            ),
            Insertion(
                source.offset(anchor.lineno, 0),
                anchor.lineno,
                indent + patch.call + _line_ending(line_of_anchor),
            ),
        ),
        filename=filename,
        added_lines=2,
    )


def _locate(source: SourceText, patch: Patch) -> _Site | None:
    """Return where the patch goes, or None if the function makes the call already."""
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError) as error:
        raise _refusal(patch, f"it isn't valid Python for this interpreter ({error})") from error
    function = _function(tree, patch)
    origins = [origin for name, origin in _module_names(tree) if name == patch.import_name]
    if _calls(function, patch.import_name):
        if origins == [patch.import_from]:
            return None
        raise _refusal(patch, f"{patch.function} calls a {patch.import_name} that isn't {patch.import_from}'s")
    if origins:
        raise _refusal(patch, f"the name {patch.import_name} is taken, and {patch.function} doesn't call it")
    missing = _names_read(patch.call) - _parameters(function) - {patch.import_name}
    if missing:
        raise _refusal(patch, f"{patch.function} has no parameter {' or '.join(sorted(missing))}")
    anchors = patch.anchor.find(function)
    if len(anchors) != 1:
        raise _refusal(patch, f"{patch.function} has {patch.anchor} {len(anchors)} times instead of once")
    return _Site(last_import=_last_import(tree, patch), anchor=anchors[0])


def _function(tree: ast.Module, patch: Patch) -> _Function:
    body, path = tree.body, patch.function.split(".")
    for depth, name in enumerate(path):
        kind = (ast.FunctionDef, ast.AsyncFunctionDef) if depth == len(path) - 1 else (ast.ClassDef,)
        found = [node for node in body if isinstance(node, kind) and node.name == name]
        if len(found) != 1:
            raise _refusal(patch, f"it defines {'.'.join(path[: depth + 1])} {len(found)} times instead of once")
        if isinstance(found[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
            return found[0]
        body = found[0].body
    raise AssertionError("a path has at least one part, and its last part is a function")


def _last_import(tree: ast.Module, patch: Patch) -> ast.stmt:
    """Return the end of the import block at the module's top; imports under conditions don't belong to it."""
    last: ast.stmt | None = None
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            last = statement
        elif last is not None or not _is_docstring(statement):
            break
    if last is None:
        raise _refusal(patch, "it doesn't begin with imports")
    return last


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _module_names(tree: ast.Module) -> list[tuple[str, str | None]]:
    """Return the names bound by imports and definitions at the module's top level, with the module they come from."""
    names: list[tuple[str, str | None]] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names += [(alias.asname or alias.name, node.module) for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [(alias.asname or alias.name, None) for alias in node.names]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append((node.name, None))
    return names


def _calls(function: _Function, name: str) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(function)
    )


def _names_read(statement: str) -> set[str]:
    nodes = ast.walk(ast.parse(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _parameters(function: _Function) -> set[str]:
    arguments = function.args
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _line_ending(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]


def _apply(
    source: SourceText,
    patch: Patch,
    insertions: tuple[Insertion, ...],
    *,
    filename: str,
    added_lines: int,
) -> Edit:
    """Insert, and check what was promised: nothing else changed, and the call is in the function."""
    text = source.text
    for insertion in reversed(insertions):
        text = text[: insertion.offset] + insertion.text + text[insertion.offset :]
    result = SourceText(text, source.encoding)

    stripped = text
    for insertion in insertions:
        if stripped.count(insertion.text) != 1:
            raise _refusal(patch, f"it has the text `{insertion.text.strip()}` already")
        stripped = stripped.replace(insertion.text, "")
    if SourceText(stripped, source.encoding).data != source.data:
        raise _refusal(patch, "taking the inserted text out again doesn't restore the original")
    if len(result.lines) != len(source.lines) + added_lines:
        raise _refusal(patch, f"the edit adds {len(result.lines) - len(source.lines)} lines instead of {added_lines}")
    try:
        code = compile(text, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise _refusal(patch, f"the result doesn't compile ({error})") from error
    if patch.import_name not in code.co_names or patch.import_name not in _code_of(code, patch).co_names:
        raise _refusal(patch, f"the result doesn't call {patch.import_name} in {patch.function}")
    return Edit(source, insertions, result, code)


def _code_of(module: CodeType, patch: Patch) -> CodeType:
    code = module
    for name in patch.function.split("."):
        found = [const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name]
        if len(found) != 1:
            raise _refusal(patch, f"the compiled result has {name} {len(found)} times instead of once")
        code = found[0]
    return code


def _refusal(patch: Patch, problem: str) -> PatchError:
    return PatchError(
        f"{patch.path} can't take the patch {patch.id}: {problem}; "
        f"use a vLLM from {patch.releases}, or a newer kvplug-hooks."
    )
