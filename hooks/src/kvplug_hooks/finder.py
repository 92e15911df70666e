"""Delivery at import: a finder on `sys.meta_path` that patches vLLM's model runners in memory as they are imported.

No file of vLLM's changes, and its bytecode cache is neither read nor written for a patched module. What can't be
patched is loaded as it is, so that people who use no connector never notice; `status()` remembers why, and a
connector that needs the hook refuses with that reason.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from kvplug_hooks.patches import all_patches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

    from kvplug_hooks.patch import Patch
    from kvplug_hooks.source import SourceText

__all__ = ["PatchStatus", "State", "install", "patched_modules", "status", "uninstall"]

State = Literal["not installed", "pending", "applied", "already in source", "failed", "too late"]


@dataclass(frozen=True)
class PatchStatus:
    """Where a target module stands in this process."""

    #: Dotted name of the module.
    module: str
    #: Ids of the patches that concern it.
    patches: tuple[str, ...]
    state: State
    #: One sentence.
    reason: str

    @property
    def live(self) -> bool:
        """Whether the module is loaded and has the hook."""
        return self.state in ("applied", "already in source")


class HookFinder:
    """Finds the target modules where the finders after it find them, and gives them a loader that patches.

    It has no place of its own to look in, so that editable installs, zip files and overlays work like anything else.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.targets: dict[str, tuple[Patch, ...]] = {}
        for patch in patches:
            self.targets[patch.module] = (*self.targets.get(patch.module, ()), patch)
        #: What became of the targets that this finder was asked for.
        self.outcomes: dict[str, PatchStatus] = {}
        #: The targets that were loaded before this finder was installed.
        self.missed: frozenset[str] = frozenset()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a target module with a patching loader, and None for any other module."""
        if fullname not in self.targets:
            return None
        for find_spec in self._finders_after():
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = cast("Loader", PatchingLoader(self, spec.loader))
                return spec
        return None

    def record(self, module: str, state: State, reason: str) -> PatchStatus:
        """Remember what became of a target module."""
        outcome = self.describe(module, state, reason)
        self.outcomes[module] = outcome
        return outcome

    def describe(self, module: str, state: State, reason: str) -> PatchStatus:
        """Return a status of a target module."""
        return PatchStatus(module, tuple(patch.id for patch in self.targets[module]), state, reason)

    def _finders_after(self) -> Iterator[Any]:
        # Not the finders before this one: they had their turn, and one that delegates like this one would recurse.
        finders = list(sys.meta_path)
        start = finders.index(self) + 1 if self in finders else 0
        for finder in finders[start:]:
            find_spec = getattr(finder, "find_spec", None)
            if find_spec is not None:
                yield find_spec


class PatchingLoader:
    """Loads one module from patched source, or, where that can't be, leaves it to the loader that it wraps.

    Everything but the execution of the module is the wrapped loader's.
    """

    def __init__(self, finder: HookFinder, loader: Loader) -> None:
        self._finder = finder
        self._loader = loader
        self._patched: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while the object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as the wrapped loader does."""
        return self._loader.create_module(spec)

    def get_source(self, fullname: str) -> str | None:
        """Return the source that the module was made from, for `linecache` and `inspect`."""
        if self._patched is not None:
            return self._patched
        source: str | None = cast("Any", self._loader).get_source(fullname)
        return source

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, patched if possible."""
        spec = module.__spec__
        if spec is None:
            raise ImportError(f"{module.__name__} has no spec, and can't be loaded without one.")
        try:
            with _no_collections():
                patched = self._patch(spec)
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM must still load
            self._warn(self._finder.record(spec.name, "failed", str(error) or repr(error)))
            self._exec_unpatched(module, spec)
            return
        if patched is None:
            self._finder.record(spec.name, "already in source", f"{spec.origin} contains the hook.")
            self._exec_unpatched(module, spec)
            return
        code, source = patched
        self._remember_lines(spec, source)
        ids = tuple(patch.id for patch in self._finder.targets[spec.name])
        module.__dict__["__kvplug_patches__"] = ids
        exec(code, module.__dict__)  # noqa: S102 - this is what a loader does
        self._finder.record(spec.name, "applied", "The hook was patched in as the module was imported.")

    def _patch(self, spec: ModuleSpec) -> tuple[CodeType, SourceText] | None:
        """Return the patched module, or None if its source needs no patch."""
        # Here, not at the top: the interpreter's parser and our errors are of use in worker processes only.
        from kvplug_hooks.edit import inline
        from kvplug_hooks.errors import PatchError

        source = self._read(spec)
        code = None
        for patch in self._finder.targets[spec.name]:
            edit = inline(source, patch, spec.origin or spec.name)
            if edit is None:
                continue
            # If the hook's other end can't be imported, that must show here, not as vLLM executes its runner module.
            try:
                exec(patch.import_line, {})  # noqa: S102 - the very statement that is inserted
            except Exception as error:
                raise PatchError(f"`{patch.import_line}` fails ({error!r}); reinstall kvplug.") from error
            source, code = edit.result, edit.code
        return None if code is None else (code, source)

    def _read(self, spec: ModuleSpec) -> SourceText:
        from kvplug_hooks.errors import PatchError
        from kvplug_hooks.source import SourceText

        loader: Any = self._loader
        if spec.origin is not None and spec.origin.endswith(".py") and hasattr(loader, "get_data"):
            return SourceText.from_bytes(loader.get_data(spec.origin))
        text = loader.get_source(spec.name) if hasattr(loader, "get_source") else None
        if text is None:
            raise PatchError(f"{spec.origin or spec.name} has no Python source; install a vLLM that has.")
        return SourceText(text)

    def _exec_unpatched(self, module: ModuleType, spec: ModuleSpec) -> None:
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)

    def _remember_lines(self, spec: ModuleSpec, source: SourceText) -> None:
        import io
        import linecache

        # With the line endings that linecache gives the lines of a file.
        lines = io.StringIO(source.text, newline=None).readlines()
        self._patched = "".join(lines)
        filename = spec.origin or spec.name
        # No modification time: linecache then never checks the entry against the file.
        linecache.cache[filename] = (len(self._patched), None, lines, filename)

    def _warn(self, outcome: PatchStatus) -> None:
        from kvplug.log import get_logger

        get_logger(__name__).warning(
            "%s is loaded without kvplug's hook, and connectors that need it will refuse to start: %s",
            outcome.module,
            outcome.reason,
        )


@contextmanager
def _no_collections() -> Iterator[None]:
    """Hold the garbage collector back.

    Parsing makes so many objects at once that it would go over everything a worker has imported by then, several
    times, and none of it is garbage: that takes longer than parsing.
    """
    import gc

    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_finder = HookFinder(all_patches())
_lock = threading.Lock()


def _new_lock() -> None:
    # Another thread may have held the lock when this process was forked.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def install() -> None:
    """Have vLLM's model runners patched when this process, or one forked from it, imports them.

    May be called any number of times, from any thread. Imports nothing of vLLM's.
    """
    with _lock:
        if _finder in sys.meta_path:
            return
        _finder.outcomes.clear()
        _finder.missed = frozenset(name for name in _finder.targets if name in sys.modules)
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Take the finder out again. Modules that are already patched stay so."""
    with _lock:
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        _finder.outcomes.clear()
        _finder.missed = frozenset()


def status() -> dict[str, PatchStatus]:
    """Return where each target module stands in this process, by module name."""
    return {name: _status(name) for name in _finder.targets}


def patched_modules() -> tuple[str, ...]:
    """Return the target modules that are loaded in this process and have the hook, however it got there."""
    return tuple(name for name, entry in status().items() if entry.live)


def _status(name: str) -> PatchStatus:
    outcome = _finder.outcomes.get(name)
    if outcome is not None:
        return outcome
    if name in sys.modules:
        return _look_at(name)
    if _finder in sys.meta_path:
        return _finder.describe(name, "pending", "The module will be patched when it is imported.")
    return _finder.describe(
        name, "not installed", "The finder isn't installed in this process; kvplug_hooks.install() does that."
    )


def _look_at(name: str) -> PatchStatus:
    """Return the status of a module that is loaded, and not by the finder as it is now."""
    module = sys.modules[name]
    if "__kvplug_patches__" in vars(module):
        return _finder.describe(name, "applied", "The hook was patched in as the module was imported.")
    if all(_calls_hook(module, patch) for patch in _finder.targets[name]):
        return _finder.describe(name, "already in source", "The module was loaded from a file that contains the hook.")
    if _finder in sys.meta_path and name not in _finder.missed:
        loader = type(getattr(module, "__loader__", None)).__name__
        return _finder.describe(
            name,
            "failed",
            f"{name} was loaded past kvplug's finder, by {loader}; install that import hook before kvplug's.",
        )
    from kvplug_hooks.importers import import_chain

    chain = import_chain(name)
    by = f"by {', imported by '.join(chain)}" if chain else "by whom can't be told"
    return _finder.describe(
        name,
        "too late",
        f"{name} was imported before kvplug's finder was installed, {by}; import it after vLLM has loaded its plugins.",
    )


def _calls_hook(module: ModuleType, patch: Patch) -> bool:
    """Return whether the loaded function calls the hook's other end."""
    function: Any = module
    for part in patch.function.split("."):
        function = getattr(function, part, None)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    hook = getattr(sys.modules.get(patch.import_from), patch.import_name, None)
    return (
        code is not None
        and patch.import_name in code.co_names
        and hook is not None
        and vars(module).get(patch.import_name) is hook
    )
