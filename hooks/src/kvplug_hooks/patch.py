"""Declarations: what a patch inserts, where, and how long it will be needed.

A declaration is data. How it gets into a source text is the business of `kvplug_hooks.edit`, and nothing here
imports `ast`, so that installing the finder stays cheap in processes that never import a model runner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

__all__ = ["Anchor", "Before", "FirstIn", "Patch"]


class Anchor(Protocol):
    """The place in a function where a patch's call belongs.

    `str(anchor)` names the place in an error message.
    """

    def find(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
        """Return every statement of `function` before which the call could go; a patch needs exactly one."""
        ...


@dataclass(frozen=True)
class Before:
    """Right before the statement that reads `statement`, at any depth of the function's own body."""

    statement: str

    def __str__(self) -> str:
        return f"`{self.statement}`"

    def find(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
        """Return the statements that equal `statement`; nested functions and classes are not looked into."""
        import ast

        (wanted,) = ast.parse(self.statement).body
        return [
            statement
            for statement in _own_statements(function)
            if type(statement) is type(wanted) and ast.dump(statement) == ast.dump(wanted)
        ]


@dataclass(frozen=True)
class FirstIn:
    """First in the body of the function's top-level `if test:` whose body calls a method named `calling`."""

    test: str
    calling: str

    def __str__(self) -> str:
        return f"a top-level `if {self.test}:` that calls `{self.calling}`"

    def find(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
        """Return the first statement of each such body."""
        import ast

        wanted = ast.dump(ast.parse(self.test, mode="eval").body)
        return [
            statement.body[0]
            for statement in function.body
            if isinstance(statement, ast.If)
            and ast.dump(statement.test) == wanted
            and any(self._is_call(node) for child in statement.body for node in ast.walk(child))
        ]

    def _is_call(self, node: ast.AST) -> bool:
        import ast

        return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == self.calling


@dataclass(frozen=True, kw_only=True)
class Patch:
    """An import and a call that one function of one vLLM module lacks."""

    #: Unique name, `topic.variant`.
    id: str
    #: One line: what the patch is for.
    purpose: str
    #: When the patch can be deleted.
    removal_condition: str
    #: Dotted name of the module to patch.
    module: str
    #: Path of the function in that module, for example `Class.method`.
    function: str
    #: Where in the function the call goes. It must match exactly once.
    anchor: Anchor
    #: The module that has the hook's other end, and its name there.
    import_from: str
    import_name: str
    #: The inserted statement. The names that it reads must be parameters of the function.
    call: str
    #: vLLM releases that were read and take the patch. Others are judged by their source alone.
    known_releases: tuple[str, ...]

    @property
    def import_line(self) -> str:
        """The inserted import statement."""
        return f"from {self.import_from} import {self.import_name}"

    @property
    def path(self) -> str:
        """The module's file, relative to the folder that contains the `vllm` package."""
        return self.module.replace(".", "/") + ".py"

    @property
    def releases(self) -> str:
        """The known releases as a range, for messages."""
        return f"{self.known_releases[0]} to {self.known_releases[-1]}"


def _own_statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.stmt]:
    """Yield the statements of a function at any depth, but not those of functions and classes inside it."""
    import ast

    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            pending.extend(ast.iter_child_nodes(node))
