"""Tells where each patch stands in this process."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplug_hooks.finder import FINDER, is_installed
from kvplug_hooks.loader import MARK
from kvplug_hooks.status import PatchStatus, notes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from kvplug_hooks.patch import Patch

__all__ = ["patched_modules", "status"]


def status() -> dict[str, PatchStatus]:
    """Return where each patch stands in this process, by the patch's id."""
    FINDER.load_waiting()
    return {patch.id: _with_note(_status(patch)) for patch in FINDER.registry.patches}


def patched_modules() -> tuple[str, ...]:
    """Return the modules that are loaded in this process and have a patch, however it got there."""
    return tuple(dict.fromkeys(entry.module for entry in status().values() if entry.live))


def _with_note(found: PatchStatus) -> PatchStatus:
    """Let a patch that is in place say that this process's model doesn't need it."""
    reason = notes().get(found.patch)
    return replace(found, state="not concerned", reason=reason) if reason is not None and found.live else found


def _status(patch: Patch) -> PatchStatus:
    outcome = FINDER.outcomes.get(patch.id)
    if outcome is not None and outcome.state != "pending":
        return outcome
    loaded = [name for name in patch.modules if name in sys.modules]
    if (found := _found_in_place(patch, loaded)) is not None:
        return found
    if not is_installed():
        if loaded:
            return _too_late(patch, loaded[0])
        return PatchStatus(
            patch.id,
            patch.module,
            "not installed",
            "The finder isn't installed in this process; kvplug_hooks.install() does that.",
        )
    if outcome is not None:
        return _elsewhere(patch, outcome)
    return _missed(patch, loaded[0]) if loaded else _pending(patch)


def _found_in_place(patch: Patch, modules: Sequence[str]) -> PatchStatus | None:
    """Return the status of a patch that one of the loaded `modules` has, by whatever way, or None."""
    for name in modules:
        module = sys.modules[name]
        if patch.id in vars(module).get(MARK, ()):
            return PatchStatus(patch.id, name, "applied", "It was patched in as the module was imported.")
        if _calls_other_end(module, patch):
            reason = "The module was loaded from a file that contains the patch."
            return PatchStatus(patch.id, name, "already in source", reason)
    return None


def _pending(patch: Patch) -> PatchStatus:
    return PatchStatus(patch.id, patch.module, "pending", "The module will be patched when it is imported.")


def _elsewhere(patch: Patch, outcome: PatchStatus) -> PatchStatus:
    """Return the status of a patch whose function isn't in a module that could have it."""
    others = [name for name in patch.modules if name not in sys.modules and _exists(name)]
    if others:
        return replace(_pending(patch), module=others[0])
    reason = f"{outcome.reason} This vLLM doesn't have it elsewhere either: use a vLLM from {patch.releases}."
    return replace(outcome, state="failed", reason=reason)


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _missed(patch: Patch, name: str) -> PatchStatus:
    """Return the status of a patch whose module is loaded without it, and not by the finder."""
    if name in FINDER.missed:
        return _too_late(patch, name)
    loader = type(getattr(sys.modules[name], "__loader__", None)).__name__
    reason = f"{name} was loaded past kvplug's finder, by {loader}; install that import hook before kvplug's."
    return PatchStatus(patch.id, name, "failed", reason)


def _too_late(patch: Patch, name: str) -> PatchStatus:
    from kvplug_hooks.importers import import_chain

    chain = import_chain(name)
    by = f"by {', imported by '.join(chain)}" if chain else "by whom can't be told"
    return PatchStatus(
        patch.id,
        name,
        "too late",
        f"{name} was imported before kvplug's finder was installed, {by}; import it after vLLM has loaded its plugins.",
    )


def _calls_other_end(module: ModuleType, patch: Patch) -> bool:
    """Return whether the loaded function calls the patch's other end."""
    function: Any = module
    for part in patch.function.split("."):
        function = getattr(function, part, None)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    end = getattr(sys.modules.get(patch.import_from), patch.import_name, None)
    return (
        code is not None
        and patch.import_name in code.co_names
        and end is not None
        and vars(module).get(patch.import_name) is end
    )
