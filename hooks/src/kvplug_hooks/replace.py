"""Delivery into a module that is loaded already: a function's compiled code is replaced by the patched one.

vLLM's engine core imports some modules before it loads plugins, so that a finder comes too late for them. Whoever
imported a function has a reference to it, so the function object stays, with its name, globals and defaults, and only
its `__code__` changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from kvplug_hooks.edit import Edit, code_of
from kvplug_hooks.errors import PatchError
from kvplug_hooks.loader import MARK
from kvplug_hooks.memory import choose, other_end
from kvplug_hooks.outline import outline_text
from kvplug_hooks.patch import path_of
from kvplug_hooks.reading import read_source, remember_lines
from kvplug_hooks.sites import refusal

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch
    from kvplug_hooks.status import ImportState, Record

__all__ = ["replace_functions"]


def replace_functions(module: ModuleType, patches: Sequence[Patch], record: Record) -> None:
    """Patch functions of a loaded module. What can't be patched stays as it is; nothing is raised.

    Args:
        module: The loaded module.
        patches: Patches for it.
        record: Is told what became of each patch.

    """
    done = [patch for patch in patches if patch.id in vars(module).get(MARK, ())]
    for patch in done:
        record(patch, module.__name__, "applied", "It was patched in memory before.")
    left = [patch for patch in patches if patch not in done]
    try:
        _replace(module, left, record)
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM must go on
        for patch in left:
            record(patch, module.__name__, "failed", str(error) or repr(error))


def _replace(module: ModuleType, patches: Sequence[Patch], record: Record) -> None:
    spec = module.__spec__
    source = read_source(module.__loader__, module.__name__, None if spec is None else spec.origin)
    filename = str(module.__file__)
    changes: dict[str, tuple[FunctionType, CodeType, Any]] = {}

    def told(patch: Patch, name: str, state: ImportState, reason: str) -> None:
        if state == "already in source" and not _calls_other_end(module, patch):
            state = "failed"
            reason = f"{filename} was patched after this process had imported it; start the process again."
        record(patch, name, state, reason)

    def refuse(edit: Edit, patch: Patch) -> str | None:
        try:
            changes[patch.id] = (*_change(module, edit, patch), other_end(patch))
        except PatchError as error:
            return str(error)
        return None

    chosen = choose(source, module.__name__, patches, filename=filename, record=told, refuse=refuse)
    if chosen is None:
        return
    edit, applied = chosen
    remember_lines(filename, edit.result)
    for patch in applied:
        function, code, end = changes[patch.id]
        vars(module)[patch.import_name] = end
        function.__code__ = code
    vars(module)[MARK] = (*vars(module).get(MARK, ()), *(patch.id for patch in applied))
    for patch in applied:
        record(patch, module.__name__, "applied", "The function's code was replaced in the loaded module.")


def _change(module: ModuleType, edit: Edit, patch: Patch) -> tuple[FunctionType, CodeType]:
    """Return a loaded function and its new code.

    Raises:
        PatchError: What is loaded isn't what the source says, so that nobody knows what would be replaced.

    """
    path = path_of(module.__name__)
    function = _function(module, patch)
    if function is None:
        raise refusal(patch, path, f"{patch.function} is no function of this module as it is loaded")
    original = function.__code__
    # A part of the text is enough, and faster, but for what decorators do to line numbers.
    texts = filter(None, (outline_text(edit.original, [patch]), edit.original.text))
    compiled = (compile(text, original.co_filename, "exec", dont_inherit=True) for text in texts)
    if not any(_is_same(code_of(code, patch, path), original) for code in compiled):
        raise refusal(patch, path, f"{patch.function} as it is loaded isn't what the file says; somebody replaced it")
    if patch.import_name in vars(module):
        raise refusal(patch, path, f"the name {patch.import_name} is taken in the loaded module")
    code = code_of(edit.code, patch, path)
    if code.co_freevars != original.co_freevars:
        raise refusal(patch, path, f"the patched {patch.function} needs other variables of enclosing functions")
    return function, code


def _function(module: ModuleType, patch: Patch) -> FunctionType | None:
    """Return the function that was defined in the module, below whatever decorates it."""
    found: Any = module
    for name in patch.function.split("."):
        found = inspect.getattr_static(found, name, None)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    found = inspect.unwrap(found) if callable(found) else None
    return found if isinstance(found, FunctionType) and found.__globals__ is vars(module) else None


def _calls_other_end(module: ModuleType, patch: Patch) -> bool:
    function = _function(module, patch)
    return function is not None and patch.import_name in function.__code__.co_names


def _is_same(one: CodeType, other: CodeType) -> bool:
    """Return whether two code objects do the same on the same lines.

    Unlike `==`, which in Python 3.11 also compares what the interpreter keeps in the code as it runs.
    """
    names = ("co_name", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount")
    counts = ("co_firstlineno", "co_posonlyargcount", "co_kwonlyargcount")
    if any(getattr(one, name) != getattr(other, name) for name in (*names, *counts)):
        return False
    if list(one.co_lines()) != list(other.co_lines()):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(
        _is_same(mine, theirs)
        if isinstance(mine, CodeType) and isinstance(theirs, CodeType)
        else (type(mine), mine) == (type(theirs), theirs)
        for mine, theirs in zip(one.co_consts, other.co_consts, strict=True)
    )
