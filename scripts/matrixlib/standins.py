"""Executes single modules of a release, with stand-ins for everything else that they import."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kvplug_hooks.installed import Tree
from kvplug_hooks.patch import path_of

__all__ = ["StandIn", "World"]

#: Packages that are imported for real, beside the standard library.
_REAL = ("kvplug", "numpy")


class StandIn:
    """Anything: it has every attribute, can be called, inherited from, used as a type, entered and iterated over.

    It is false and empty, and as a decorator it does nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = self.__dict__[name] = StandIn(f"{self._name}.{name}")
        return attribute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is decorated, or else another stand-in."""
        if len(args) == 1 and not kwargs and isinstance(args[0], (FunctionType, type)):
            return args[0]
        return StandIn(f"{self._name}()")

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[()]:
        return ()

    def __instancecheck__(self, _instance: Any) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, _item: Any) -> bool:
        return False

    def __getitem__(self, _key: Any) -> Any:
        return StandIn(f"{self._name}[]")

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass

    def __or__(self, _other: Any) -> Any:
        return self

    __ror__ = __or__

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class World:
    """Modules of one release that know nothing of each other but what is given to them."""

    def __init__(self, tree: Tree, own: Collection[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin with no module executed.

        Args:
            tree: The release.
            own: Modules that are executed from the release's sources when something imports them.
            given: What other modules contain, by their names.

        """
        assert tree.version is not None, "sources are of a release"
        self.release = tree.version
        self._tree = tree
        self._own = frozenset(own)
        self._modules: dict[str, ModuleType] = {}
        for name, content in given.items():
            self._modules[name] = ModuleType(name)
            vars(self._modules[name]).update(content, __getattr__=StandIn(name).__getattr__)
        self._builtins = {**vars(builtins), "__import__": self._import}

    def module(self, name: str) -> Any:
        """Return a module, executed from the release's sources if it is one of its own and wasn't yet."""
        if name not in self._modules:
            path, is_package = path_of(name), False
            if not (self._tree.folder / path).exists():
                path, is_package = f"{name.replace('.', '/')}/__init__.py", True
            code = compile(self._tree.read(path).text, path, "exec", dont_inherit=True)
            self.execute(code, name, package=name if is_package else None)
        return self._modules[name]

    def execute(self, code: CodeType, name: str, *, package: str | None = None) -> Any:
        """Execute code as a module, and return the module."""
        module = self._modules[name] = ModuleType(name)
        module.__package__ = package or name.rpartition(".")[0]
        vars(module)["__builtins__"] = self._builtins
        # Dataclasses look their module up.
        outside = sys.modules.get(name)
        sys.modules[name] = module
        try:
            exec(code, vars(module))  # noqa: S102 - that is what this is for
        finally:
            if outside is None:
                del sys.modules[name]
            else:
                sys.modules[name] = outside
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002 - Python's own names
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        top = name.partition(".")[0]
        if not level and (top in _REAL or top in sys.stdlib_module_names):
            return __import__(name, globals, locals, fromlist or (), level)
        if level:
            package = str((globals or {})["__package__"]).split(".")
            name = ".".join([*package[: len(package) - level + 1], *([name] if name else [])])
        if not fromlist:
            return StandIn(top)
        if name in self._own or name in self._modules:
            return self.module(name)
        parent = StandIn(name)
        for attribute in fromlist:
            if f"{name}.{attribute}" in self._own:
                vars(parent)[attribute] = self.module(f"{name}.{attribute}")
        return parent
