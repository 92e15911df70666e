"""The ways in which a release's sources can be asked whether something is so."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from matrixlib.reading import Function, Missing, Sources, occurrences

__all__ = [
    "Abstract",
    "All",
    "Check",
    "Has",
    "ImportedOnlyBelow",
    "InOrder",
    "Inherits",
    "Never",
    "Says",
    "Sets",
    "Takes",
]


class Check(Protocol):
    """Something that holds in a release, or doesn't."""

    def __call__(self, sources: Sources) -> None:
        """Return if it holds.

        Raises:
            Missing: It doesn't. The message says what isn't there, or is there against expectation.

        """
        ...


@dataclass(frozen=True)
class Has:
    """The module has the name: a class, function, variable or import, or a member of a class."""

    path: str
    name: str

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        sources.find(self.path, self.name)


@dataclass(frozen=True)
class Takes:
    """The function can be called with these arguments, by position or name, and needs no others."""

    path: str
    name: str
    arguments: tuple[str, ...]

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        arguments = sources.function(self.path, self.name).args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        if names[:1] in (["self"], ["cls"]):
            del names[0]
        needed = names[: len(names) - len(arguments.defaults)]
        if tuple(names[: len(self.arguments)]) != self.arguments or len(needed) > len(self.arguments):
            raise Missing(f"{self.name} of {self.path} takes {', '.join(names)}")


@dataclass(frozen=True)
class Sets:
    """Some method of the class assigns this attribute of `self`."""

    path: str
    name: str
    attribute: str

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        found = sources.occurrences(self.path, self.name, f"self.{self.attribute}")
        if not any(isinstance(getattr(node, "ctx", None), ast.Store) for node in found):
            raise Missing(f"{self.name} of {self.path} never sets self.{self.attribute}")


@dataclass(frozen=True)
class Says:
    """The function, class or module has an expression or a statement (see `occurrences`)."""

    path: str
    name: str
    pattern: str

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        if not sources.occurrences(self.path, self.name, self.pattern):
            raise Missing(f"{self.name} of {self.path} has no `{self.pattern}`")


@dataclass(frozen=True)
class Never:
    """The function or class is there, and has no such expression or statement."""

    path: str
    name: str
    pattern: str

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        if found := sources.occurrences(self.path, self.name, self.pattern):
            raise Missing(f"{self.name} of {self.path} has `{self.pattern}` in line {_line(found[0])}")


@dataclass(frozen=True)
class InOrder:
    """The function has all of these, and each place of one comes before each place of the next."""

    path: str
    name: str
    patterns: tuple[str, ...]

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        sources.function(self.path, self.name)
        places = {pattern: sources.occurrences(self.path, self.name, pattern) for pattern in self.patterns}
        for pattern, found in places.items():
            if not found:
                raise Missing(f"{self.name} of {self.path} has no `{pattern}`")
        for first, second in pairwise(self.patterns):
            last, start = places[first][-1], places[second][0]
            if _line(last) >= _line(start):
                where = f"in line {_line(last)} and `{second}` in line {_line(start)}"
                raise Missing(f"{self.name} of {self.path} has `{first}` {where}")


@dataclass(frozen=True)
class ImportedOnlyBelow:
    """When they are imported, modules outside of a folder import this module of theirs not at all."""

    module: str
    folder: str

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        package = self.module.rpartition(".")[0]
        words = f"from {self.module} ", f"import {self.module}", f"from {package} import"
        for path in sources.mentioning(self.folder.replace("/", ".")):
            text = sources.tree.read(path).text
            if not path.startswith(f"{self.folder}/") and any(word in text for word in words):
                for line in _imports(sources.module(path), self.module):
                    raise Missing(f"{path} imports {self.module} in line {line}")


@dataclass(frozen=True)
class Inherits:
    """The class derives from the other one, and has the method from there."""

    path: str
    name: str
    base: str
    method: str

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        node = sources.find(self.path, self.name)
        if not any(occurrences(base, self.base) for base in getattr(node, "bases", ())):
            raise Missing(f"{self.name} of {self.path} doesn't derive from {self.base}")
        if any(isinstance(member, Function) and member.name == self.method for member in getattr(node, "body", ())):
            raise Missing(f"{self.name} of {self.path} has a {self.method} of its own")


@dataclass(frozen=True)
class Abstract:
    """These methods of the class, and no others, have to be implemented."""

    path: str
    name: str
    methods: tuple[str, ...]

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        found = {
            node.name
            for node in getattr(sources.find(self.path, self.name), "body", ())
            if isinstance(node, ast.FunctionDef)
            and any(occurrences(decorator, "abstractmethod") for decorator in node.decorator_list)
        }
        if found != set(self.methods):
            raise Missing(f"{self.name} of {self.path} has the abstract methods {', '.join(sorted(found))}")


@dataclass(frozen=True)
class All:
    """All of them hold."""

    checks: tuple[Check, ...]

    def __call__(self, sources: Sources) -> None:
        """See `Check`."""
        for check in self.checks:
            check(sources)


def _line(node: ast.AST) -> int:
    line: int = getattr(node, "lineno", 0)
    return line


def _imports(tree: ast.Module, module: str) -> list[int]:
    """Return the lines in which importing a module imports another one; functions and type checks don't count."""
    lines = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import) and any(alias.name == module for alias in node.names):
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if module in names:
                lines.append(node.lineno)
        if isinstance(node, ast.If) and occurrences(node.test, "TYPE_CHECKING"):
            pending.extend(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.expr)):
            pending.extend(ast.iter_child_nodes(node))
    return lines
