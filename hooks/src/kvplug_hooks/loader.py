"""Loads one module from patched source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from kvplug_hooks.edit import Edit
    from kvplug_hooks.patch import Patch
    from kvplug_hooks.status import Record

__all__ = ["MARK", "PatchingLoader"]

#: Attribute of a module that was patched in memory: the patches' ids.
MARK = "__kvplug_patches__"


class PatchingLoader:
    """Loads one module from patched source, or, where that can't be, leaves it to the loader that it wraps.

    Everything but the execution of the module is the wrapped loader's.
    """

    def __init__(self, loader: Loader, patches: Sequence[Patch], record: Record) -> None:
        self._loader = loader
        self._patches = patches
        self._record = record
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
            patched = self._choose(spec)
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM must still load
            for patch in self._patches:
                self._record(patch, spec.name, "failed", str(error) or repr(error))
            patched = None
        if patched is None:
            spec.loader = module.__loader__ = self._loader
            self._loader.exec_module(module)
            return
        from kvplug_hooks.reading import remember_lines

        edit, applied = patched
        self._patched = remember_lines(spec.origin or spec.name, edit.result)
        module.__dict__[MARK] = tuple(patch.id for patch in applied)
        exec(edit.code, module.__dict__)  # noqa: S102 - this is what a loader does
        for patch in applied:
            self._record(patch, spec.name, "applied", "It was patched in as the module was imported.")

    def _choose(self, spec: ModuleSpec) -> tuple[Edit, list[Patch]] | None:
        """Return the patched module and the patches in it, or None if it is to be loaded as it is."""
        # Here, not at the top: the interpreter's parser and our errors are of use in worker processes only.
        from kvplug_hooks.errors import PatchError
        from kvplug_hooks.memory import choose, other_end
        from kvplug_hooks.reading import read_source

        def refuse(_edit: Edit, patch: Patch) -> str | None:
            try:
                other_end(patch)
            except PatchError as error:
                return str(error)
            return None

        source = read_source(self._loader, spec.name, spec.origin)
        return choose(
            source,
            spec.name,
            self._patches,
            filename=spec.origin or spec.name,
            record=self._record,
            refuse=refuse,
        )
