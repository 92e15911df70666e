"""Registration of a live connector's hook implementations, and calls that one bad plugin can't spoil."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pluggy

from kvplug.errors import UnsupportedError
from kvplug.hookspecs import PROJECT, HookSpecs, has_hooks
from kvplug.log import RateLimited, get_logger
from kvplug.stats import Stats

__all__ = ["HookedConnector", "check_hooks", "distribution_of"]

logger = get_logger(__name__)
_limited = RateLimited(logger)


class _Manager(pluggy.PluginManager):
    """A plugin manager that looks for marks on the class.

    pluggy would read every attribute of a connector instance, properties included, which may do anything.
    """

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        method = inspect.getattr_static(type(plugin), name, None)
        return getattr(method, f"{PROJECT}_impl", None) if inspect.isroutine(method) else None


class HookedConnector:
    """One live connector (or child of a `MultiConnector`) that implements hooks."""

    def __init__(self, connector: Any, path: tuple[int, ...], stats: Stats) -> None:
        """Register the connector's marked methods.

        Args:
            connector: The worker-side connector.
            path: Where it is below the worker's connector (see `compat.connector_members`).
            stats: Where errors are counted.

        Raises:
            UnsupportedError: A marked method is no hook, or takes an argument that the hook doesn't have.

        """
        self.connector = connector
        self.path = path
        self.hooks = has_hooks(type(connector))
        self._stats = stats
        manager = _Manager(PROJECT)
        manager.add_hookspecs(HookSpecs)
        try:
            manager.register(connector, self.name)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            known = sorted(n for n, m in vars(HookSpecs).items() if hasattr(m, f"{PROJECT}_spec"))
            raise UnsupportedError(
                f"{self.name} has a hook that kvplug doesn't know ({' '.join(str(error).split())}): the hooks are "
                f"{', '.join(known)}."
            ) from error
        self._calls = {name: _caller(getattr(manager.hook, name)) for name in self.hooks}

    @property
    def name(self) -> str:
        """Class, distribution and version, for messages."""
        cls = type(self.connector)
        return f"{cls.__name__} ({distribution_of(cls)})"

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call one hook of this connector.

        Returns:
            What the implementation returned; None if it has none, or raised. An exception is logged with the plugin's
            name and counted, and goes no further.

        """
        call = self._calls.get(hook)
        if call is None:
            return None
        try:
            return call(arguments)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            self.failed(hook, error)
            return None

    def failed(self, hook: str, error: BaseException) -> None:
        """Count and log that a hook of this connector didn't do its work."""
        self._stats.add("plugin_errors")
        _limited.warning(
            (self.name, hook, type(error)),
            "%s: hook %s failed, the step goes on without it: %s: %s",
            self.name,
            hook,
            type(error).__name__,
            error,
        )
        logger.debug("%s: hook %s failed", self.name, hook, exc_info=error)


def check_hooks(connector_class: type) -> None:
    """Refuse a class whose marked methods don't fit the hooks, before there is an instance.

    Raises:
        UnsupportedError: A marked method is no hook, or takes an argument that the hook doesn't have.

    """
    HookedConnector(object.__new__(connector_class), (), Stats())


def _caller(hook: pluggy.HookCaller) -> Callable[[dict[str, Any]], Any]:
    """Return a function that calls the only implementation of a hook, with the arguments that it names.

    pluggy's own loop over implementations takes several microseconds, at every step of the engine. It is left out where
    it would have nothing to do.
    """
    (implementation,) = hook.get_hookimpls()
    if implementation.hookwrapper or implementation.wrapper:

        def call_wrapper(arguments: dict[str, Any]) -> Any:
            results = hook(**arguments)
            return results[0] if results else None

        return call_wrapper
    function, names = implementation.function, implementation.argnames

    def call(arguments: dict[str, Any]) -> Any:
        return function(*[arguments[name] for name in names])

    return call


def distribution_of(cls: type) -> str:
    """Return `name version` of the distribution that declares a connector class, or its module if none does."""
    return _distribution_of(f"{cls.__module__}:{cls.__qualname__}") or cls.__module__


@lru_cache(maxsize=64)
def _distribution_of(value: str) -> str | None:
    import importlib_metadata

    for entry_point in importlib_metadata.entry_points(group="vllm.kv_connectors"):
        if entry_point.value.replace(" ", "") == value and entry_point.dist is not None:
            return f"{entry_point.dist.name} {entry_point.dist.version}"
    return None
