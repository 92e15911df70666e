"""Tells who imported a module, as far as that can be told afterwards."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType

__all__ = ["import_chain"]

_MAX_LENGTH = 4


def import_chain(name: str) -> list[str]:
    """Return the module that imported `name` first, the one that imported that, and so on, at most four.

    A guess from what loaded modules hold: an import inside a function leaves no trace, and gives an empty list.
    """
    chain: list[str] = []
    importer = _importer(name)
    while importer is not None and importer not in (name, *chain) and len(chain) < _MAX_LENGTH:
        chain.append(importer)
        importer = _importer(importer)
    return chain


def _importer(name: str) -> str | None:
    if name == "__main__":
        return None
    # sys.modules is in the order in which imports ended, so whoever caused an import comes soon after it;
    # those that are still being imported, the main module among them, are before it.
    names = list(sys.modules)
    position = names.index(name)
    for candidate in (*names[position + 1 :], *reversed(names[:position])):
        if not name.startswith(f"{candidate}.") and _holds(candidate, name):
            return candidate
    return None


def _holds(candidate: str, name: str) -> bool:
    """Return whether a module has `name`, or a class or function defined there, among its globals."""
    module = sys.modules.get(candidate)
    # type(), not isinstance(): lazy proxies answer isinstance by importing what they stand for.
    if module is None or not issubclass(type(module), ModuleType):
        return False
    target = sys.modules[name]
    return any(
        value is target
        or (issubclass(type(value), type) and vars(value).get("__module__") == name)
        or (type(value) is FunctionType and value.__module__ == name)
        for value in list(vars(module).values())
    )
