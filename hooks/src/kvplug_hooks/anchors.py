"""Places in a function where a patch's call can belong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

__all__ = ["Anchor", "Before", "FirstIn", "FirstStatement"]


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


@dataclass(frozen=True)
class FirstStatement:
    """First in the function, after its docstring if it has one."""

    def __str__(self) -> str:
        return "a first statement after its docstring"

    def find(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
        """Return the first statement that isn't the docstring; none if there is nothing else."""
        import ast

        return function.body[:1] if ast.get_docstring(function, clean=False) is None else function.body[1:2]


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
