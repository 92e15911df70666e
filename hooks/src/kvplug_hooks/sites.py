"""Finds the places of patches in a module, by its syntax tree: exactly one each, or a refusal."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from kvplug_hooks.errors import PatchError

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch
    from kvplug_hooks.source import SourceText

__all__ = ["Parsed", "Site", "State", "locate", "refusal", "survey", "without_conflicts"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef

#: `not needed`: upstream has its own fix, or it is another line of releases. `unsupported`: the release or the source
#: isn't known to work. `conflict`: another patch wants the same place.
State = Literal["fits", "already in source", "not needed", "not concerned", "unsupported", "conflict"]


@dataclass(frozen=True, eq=False)
class Site:
    """What a module's source says about a patch."""

    patch: Patch
    state: State
    #: One sentence.
    reason: str
    #: The statement before which the call goes, or which follows it. Only if the place can be told.
    anchor: ast.stmt | None = None


@dataclass(frozen=True, eq=False)
class Parsed:
    """A module's source and its syntax tree, which may lack what is of no interest."""

    source: SourceText
    #: The file for messages, relative to the folder that contains the `vllm` package.
    path: str
    tree: ast.Module

    @classmethod
    def parse(cls, source: SourceText, path: str) -> Parsed:
        """Parse a source.

        Raises:
            SyntaxError: It isn't Python for this interpreter.

        """
        try:
            return cls(source, path, ast.parse(source.text))
        except ValueError as error:  # null bytes
            raise SyntaxError(str(error)) from error

    def defines(self, patch: Patch) -> bool:
        """Return whether the module has something of the patched function's name."""
        return _definitions(self.tree, patch.function)[1] > 0

    @cached_property
    def last_import(self) -> ast.stmt | None:
        """The end of the import block at the module's top; imports under conditions don't belong to it."""
        last: ast.stmt | None = None
        for statement in self.tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                last = statement
            elif last is not None or not _is_docstring(statement):
                break
        return last


def refusal(patch: Patch, path: str, problem: str) -> PatchError:
    """Make the error for a patch that has no exact place in a file."""
    return PatchError(
        f"{path} can't take the patch {patch.id}: {problem}; use a vLLM from {patch.releases}, or a newer kvplug-hooks."
    )


def survey(source: SourceText, path: str, patches: Sequence[Patch]) -> tuple[Parsed | None, list[Site]]:
    """Parse a module and find each patch's place in it; the module is None if it can't be parsed."""
    try:
        parsed = Parsed.parse(source, path)
    except SyntaxError as error:
        problem = f"it isn't valid Python for this interpreter ({error})"
        return None, [Site(patch, "unsupported", str(refusal(patch, path, problem))) for patch in patches]
    return parsed, locate(parsed, patches)


def locate(parsed: Parsed, patches: Sequence[Patch]) -> list[Site]:
    """Find each patch's place in a module, as if it were the only one; see `without_conflicts` for the rest.

    The calls that patches have inserted already are taken out of the syntax tree first, so that every patch is
    judged by the original code, in whichever order they came. The source text isn't touched.
    """
    sites: dict[str, Site] = {}
    found: list[tuple[Patch, _Function, bool]] = []
    for patch in patches:
        try:
            function = _function(parsed, patch)
            present = _is_present(parsed, patch, function)
        except PatchError as error:
            sites[patch.id] = Site(patch, "unsupported", str(error))
            continue
        found.append((patch, function, present))
    for patch, function, present in found:
        if present:
            _take_out(function, patch)
    for patch, function, present in found:
        sites[patch.id] = _site(parsed, patch, function, present=present)
    return [sites[patch.id] for patch in patches]


def without_conflicts(sites: Sequence[Site], path: str) -> list[Site]:
    """Return the sites of one module; those that would get into each other's way are conflicts.

    Of two that are to be inserted, neither wins. One that is in the source already stays.
    """
    return [_against(site, sites, path) if site.state == "fits" else site for site in sites]


def _against(site: Site, sites: Iterable[Site], path: str) -> Site:
    patch = site.patch
    for other in sites:
        if other is site or other.state not in ("fits", "already in source"):
            continue
        if site.anchor is other.anchor:
            problem = f"want the same place in {patch.function}, {patch.anchor}"
        elif patch.import_name == other.patch.import_name and (
            patch.import_from != other.patch.import_from or patch.function == other.patch.function
        ):
            problem = f"both bring a {patch.import_name}"
        else:
            continue
        first, second = sorted((patch.id, other.patch.id))
        return replace(
            site,
            state="conflict",
            reason=f"In {path}, the patches {first} and {second} {problem}; leave one of them out.",
        )
    return site


def _site(parsed: Parsed, patch: Patch, function: _Function, *, present: bool) -> Site:
    try:
        anchors = patch.anchor.find(function)
    except Exception as error:  # noqa: BLE001 - anchors come from whoever declares a patch
        failure = f"looking for {patch.anchor} fails ({error!r})"
        return Site(patch, "unsupported", str(refusal(patch, parsed.path, failure)))
    anchor = anchors[0] if len(anchors) == 1 else None
    if present:
        return Site(patch, "already in source", f"{parsed.path} contains the patch.", anchor)
    problem: str | None = None
    if anchor is None:
        problem = f"{patch.function} has {patch.anchor} {len(anchors)} times instead of once"
    elif missing := _names_read(patch.call) - _parameters(function) - {patch.import_name}:
        problem = f"{patch.function} has no parameter {' or '.join(sorted(missing))}"
    elif parsed.last_import is None:
        problem = "it doesn't begin with imports"
    if anchor is None or problem is not None:
        return Site(patch, "unsupported", str(refusal(patch, parsed.path, problem or "")))
    return Site(patch, "fits", f"The call goes into {patch.function} at line {anchor.lineno}.", anchor)


def _function(parsed: Parsed, patch: Patch) -> _Function:
    nodes, count = _definitions(parsed.tree, patch.function)
    if isinstance(nodes[-1], (ast.FunctionDef, ast.AsyncFunctionDef)) and count == 1:
        return nodes[-1]
    name = ".".join(patch.function.split(".")[: len(nodes)])
    raise refusal(patch, parsed.path, f"it defines {name} {count} times instead of once")


def _definitions(tree: ast.Module, path: str) -> tuple[list[ast.AST], int]:
    """Follow a dotted path of names down from the module.

    Returns:
        The nodes on the way, without the module, as far as each name is defined exactly once, plus one more entry for
        the name at which that ends; and how often that one is defined.

    """
    nodes: list[ast.AST] = []
    body, names = tree.body, path.split(".")
    for depth, name in enumerate(names):
        kind = (ast.FunctionDef, ast.AsyncFunctionDef) if depth == len(names) - 1 else (ast.ClassDef,)
        found = [node for node in body if isinstance(node, kind) and node.name == name]
        nodes.append(found[0] if found else tree)
        if len(found) != 1:
            return nodes, len(found)
        body = found[0].body
    return nodes, 1


def _is_present(parsed: Parsed, patch: Patch, function: _Function) -> bool:
    """Return whether the function makes the call already.

    Raises:
        PatchError: There is only a part of the patch, or something else of its name.

    """
    origins = [origin for name, origin in _module_names(parsed.tree) if name == patch.import_name]
    if _calls(function, patch.import_name):
        if origins == [patch.import_from]:
            return True
        problem = f"{patch.function} calls a {patch.import_name} that isn't {patch.import_from}'s"
        raise refusal(patch, parsed.path, problem)
    if origins:
        problem = f"the name {patch.import_name} is taken, and {patch.function} doesn't call it"
        raise refusal(patch, parsed.path, problem)
    return False


def _take_out(function: _Function, patch: Patch) -> None:
    """Remove the patch's call from the syntax tree."""
    (call,) = ast.parse(patch.call).body
    wanted = ast.dump(call)
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                body[:] = [child for child in body if type(child) is not type(call) or ast.dump(child) != wanted]


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
