"""Looks things up in a release's sources by their syntax trees. Nothing of vLLM's is imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from kvplug_hooks.errors import PatchError
from kvplug_hooks.installed import Tree

__all__ = ["Function", "Missing", "Sources", "occurrences"]

Function = ast.FunctionDef | ast.AsyncFunctionDef

_ANYTHING = "_"


class Missing(Exception):  # noqa: N818 - it isn't an error: most facts begin with some release
    """The sources don't have what is looked for; the message says what."""


class Sources:
    """One release's sources, parsed when they are looked at."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._modules: dict[str, ast.Module] = {}
        self._mentioning: dict[str, list[str]] = {}
        self._parts: dict[tuple[str, str], tuple[ast.AST, ...]] = {}

    def mentioning(self, text: str) -> list[str]:
        """Return the files that contain a text, relative to the folder that contains the package."""
        if text not in self._mentioning:
            root, data = str(self.tree.folder), text.encode()
            found = [path for path in _files(f"{root}/vllm") if data in Path(path).read_bytes()]
            self._mentioning[text] = [path[len(root) + 1 :] for path in found]
        return self._mentioning[text]

    def module(self, path: str) -> ast.Module:
        """Return a parsed module.

        Raises:
            Missing: There is no such file.

        """
        if path not in self._modules:
            try:
                text = self.tree.read(path).text
            except PatchError as error:
                raise Missing(f"there is no {path}") from error
            self._modules[path] = ast.parse(text)
        return self._modules[path]

    def find(self, path: str, name: str) -> ast.AST:
        """Return what binds a dotted name in a module: a definition, an assignment, or an import.

        Raises:
            Missing: Nothing does.

        """
        node: ast.AST = self.module(path)
        for part in name.split("."):
            found = [child for child in _bindings(node) if part in _bound(child)]
            if not found:
                raise Missing(f"{path} has no {name}")
            node = found[-1]
        return node

    def function(self, path: str, name: str) -> Function:
        """Return a function or method.

        Raises:
            Missing: There is none of this name.

        """
        node = self.find(path, name)
        if not isinstance(node, Function):
            raise Missing(f"{name} of {path} isn't a function")
        return node

    def occurrences(self, path: str, name: str, pattern: str) -> list[ast.AST]:
        """Return, in the order of the text, every part of what binds a name that matches a pattern.

        Args:
            path: The module's file.
            name: As for `find`.
            pattern: An expression or a statement. In it `_` stands for any expression, and `f(...)` for a call of `f`
                with any arguments.

        Raises:
            Missing: Nothing binds the name.

        """
        if (path, name) not in self._parts:
            self._parts[path, name] = tuple(ast.walk(self.find(path, name)))
        return _occurrences(self._parts[path, name], pattern)


def _files(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (f"{parent}/{name}" for name in sorted(names) if name.endswith(".py"))


def _bindings(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or class, also those under conditions."""
    for statement in getattr(node, "body", ()):
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _bindings(statement)


def _bound(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def occurrences(node: ast.AST, pattern: str) -> list[ast.AST]:
    """Return every part of a syntax tree that matches a pattern (see `Sources.occurrences`)."""
    return _occurrences(ast.walk(node), pattern)


def _occurrences(nodes: Iterable[ast.AST], pattern: str) -> list[ast.AST]:
    wanted = _parsed(pattern)
    kind = type(wanted)
    found = [node for node in nodes if type(node) is kind and _matches(wanted, node)]
    return sorted(found, key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))


@cache
def _parsed(pattern: str) -> ast.AST:
    (statement,) = ast.parse(pattern).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _matches(pattern: ast.AST, node: ast.AST) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id == _ANYTHING:
        return isinstance(node, ast.expr)
    if type(pattern) is not type(node):
        return False
    fields: Sequence[str] = [field for field in pattern._fields if field not in ("ctx", "type_comment", "kind")]
    if isinstance(pattern, ast.Call) and _takes_anything(pattern):
        fields = ["func"]
    return all(_equal(getattr(pattern, field, None), getattr(node, field, None)) for field in fields)


def _takes_anything(call: ast.Call) -> bool:
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value is Ellipsis


def _equal(pattern: object, value: object) -> bool:
    if isinstance(pattern, ast.AST):
        return isinstance(value, ast.AST) and _matches(pattern, value)
    if isinstance(pattern, list):
        return isinstance(value, list) and len(pattern) == len(value) and all(map(_equal, pattern, value))
    return pattern == value
