"""Delivery at import: a finder on `sys.meta_path` that has vLLM's modules patched in memory as they are imported.

No file of vLLM's changes, and its bytecode cache is neither read nor written for a patched module. What can't be
patched is loaded as it is, so that people who use no connector never notice; `status()` remembers why, and a
connector that needs the hook refuses with that reason.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

from kvplug_hooks.loader import PatchingLoader
from kvplug_hooks.registry import OWN, Entry, Registry, discover_entries, own_patches
from kvplug_hooks.status import ImportState, PatchStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from kvplug_hooks.patch import Patch

__all__ = ["FINDER", "HookFinder", "install", "is_installed", "uninstall"]


class HookFinder:
    """Finds the target modules where the finders after it find them, and gives them a loader that patches.

    It has no place of its own to look in, so that editable installs, zip files and overlays work like anything else.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Go back to the beginning: only this distribution's patches are known, and nothing has happened."""
        self.registry = Registry()
        self.registry.add(own_patches(), OWN)
        #: Entry points that are loaded when one of their targets is imported, by target.
        self._waiting: dict[str, list[Entry]] = defaultdict(list)
        #: What became of the patches that this finder was asked for, by id.
        self.outcomes: dict[str, PatchStatus] = {}
        #: The target modules that were loaded before this finder knew of them.
        self.missed: set[str] = set()

    def patches_of(self, module: str) -> tuple[Patch, ...]:
        """Return the patches that are for a module."""
        return tuple(patch for patch in self.registry.patches if module in patch.modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a target module with a patching loader, and None for any other module."""
        if not fullname.startswith("vllm."):
            return None
        for entry in self._waiting.pop(fullname, ()):
            self.load(entry)
        patches = self.patches_of(fullname)
        if not patches:
            return None
        for find_spec in self._finders_after():
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = cast("Loader", PatchingLoader(spec.loader, patches, self.record))
                return spec
        return None

    def look_around(self) -> None:
        """Learn of the patches that other distributions ship, and patch what is loaded already and can be."""
        entries, rejected = discover_entries()
        for broken in rejected:
            self.registry.reject(broken.name, broken.source, broken.reason)
        for entry in entries:
            if entry.targets is None or not sys.modules.keys().isdisjoint(entry.targets):
                self.load(entry)
            else:
                for module in entry.targets:
                    self._waiting[module].append(entry)
        self._meet_loaded_modules()

    def load(self, entry: Entry) -> None:
        """Load the patches of an entry point, once."""
        for entries in self._waiting.values():
            if entry in entries:
                entries.remove(entry)
        self.registry.add_entry(entry)

    def load_waiting(self) -> None:
        """Load the entry points whose targets weren't imported, for whoever wants to know all patches."""
        for entry in {entry: None for entries in self._waiting.values() for entry in entries}:
            self.load(entry)

    def record(self, patch: Patch, module: str, state: ImportState, reason: str) -> None:
        """Remember what became of a patch, and say so if it should be known."""
        if state == "pending" and patch.id in self.outcomes:
            return  # another module has the function
        self.outcomes[patch.id] = PatchStatus(patch.id, module, state, reason)
        if state == "failed":
            from kvplug.log import get_logger

            get_logger(__name__).warning(
                "%s is loaded without the patch %s (%s) %s", module, patch.id, patch.purpose, reason
            )
        if state in ("applied", "failed"):
            from kvplug_hooks.gone import file_patch_gone

            file = getattr(sys.modules.get(module), "__file__", None)
            if (gone := file_patch_gone(patch.id, module, file)) is not None:
                from kvplug.log import get_logger

                get_logger(__name__).warning("%s", gone)

    def _meet_loaded_modules(self) -> None:
        targets = {module for patch in self.registry.patches for module in patch.modules}
        for name in targets & sys.modules.keys():
            self.missed.add(name)
            patches = [patch for patch in self.patches_of(name) if patch.applied == "replace"]
            if patches:
                from kvplug_hooks.replace import replace_functions

                replace_functions(sys.modules[name], patches, self.record)

    def _finders_after(self) -> Iterator[Any]:
        # Not the finders before this one: they had their turn, and one that delegates like this one would recurse.
        finders = list(sys.meta_path)
        start = finders.index(self) + 1 if self in finders else 0
        for finder in finders[start:]:
            find_spec = getattr(finder, "find_spec", None)
            if find_spec is not None:
                yield find_spec


FINDER = HookFinder()
_lock = threading.RLock()


def _new_lock() -> None:
    # Another thread may have held the lock when this process was forked.
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def install() -> None:
    """Have vLLM's modules patched when this process, or one forked from it, imports them.

    May be called any number of times, from any thread. Imports nothing of vLLM's.
    """
    with _lock:
        if FINDER in sys.meta_path:
            return
        FINDER.forget()
        # First of all: loading other distributions' patches may import a target.
        sys.meta_path.insert(0, FINDER)
        FINDER.look_around()


def uninstall() -> None:
    """Take the finder out again. Modules that are already patched stay so."""
    with _lock:
        if FINDER in sys.meta_path:
            sys.meta_path.remove(FINDER)
        FINDER.outcomes.clear()
        FINDER.missed.clear()


def is_installed() -> bool:
    """Return whether the finder is at work in this process."""
    return FINDER in sys.meta_path
