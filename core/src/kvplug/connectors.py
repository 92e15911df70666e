"""Load a connector class when vLLM asks for it, and make it one that vLLM can construct.

vLLM's connector registry imports a module and takes an attribute of it. What kvplug registers there is this module
and an attribute that `attribute` makes of the connector's name: nothing of a connector is imported before vLLM asks
for it, and what goes wrong then is said in full.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvplug.discovery import ConnectorEntry, Discovery, SkippedEntry, discover
from kvplug.errors import KvplugError
from kvplug.hookspecs import needed_hooks

__all__ = ["attribute", "load", "publish", "publish_also"]

# A colon can't be in an identifier, so no connector's name ever meets a name of this module.
_PREFIX = "connector:"

# What the last `publish` said; None before the first.
_published: dict[str, ConnectorEntry | SkippedEntry] | None = None


# -- Names -----------------------------------------------------------------------------------------------------------


def attribute(name: str) -> str:
    """Return the attribute of this module that stands for a connector, by the connector's name."""
    return _PREFIX + name


def __getattr__(name: str) -> Any:
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    entry = _find(name.removeprefix(_PREFIX))
    cls = load(entry)
    if cls.__name__ not in (_published or {}):
        # The class is called otherwise than its module calls it, which only an import tells. vLLM's metrics look
        # classes up by their own name.
        from kvplug import autoload

        autoload.add(replace(entry, name=cls.__name__, implied=True))
    return cls


def publish(discovery: Discovery) -> None:
    """Make what was discovered the answer to names, in this process and in what is forked from it."""
    global _published  # noqa: PLW0603 - one set of connectors per process, as in vLLM's registry
    _published = {
        **{skipped.name: skipped for skipped in reversed(discovery.skipped)},
        **{entry.name: entry for entry in discovery.entries},
    }


def publish_also(entry: ConnectorEntry) -> None:
    """Add one name to what was published."""
    if _published is not None:
        _published[entry.name] = entry


def _find(name: str) -> ConnectorEntry:
    if _published is None:
        publish(discover())
    found = (_published or {}).get(name)
    if isinstance(found, ConnectorEntry):
        return found
    if found is not None:
        raise KvplugError(f"Connector {name!r} of {found.distribution} {found.version} isn't used. {found.reason}")
    known = sorted(name for name, entry in (_published or {}).items() if isinstance(entry, ConnectorEntry))
    raise KvplugError(
        f"No installed distribution declares a connector {name!r} (declared: {', '.join(known) or 'none'}): "
        "install the one that has it, and see `kvplug list`."
    )


# -- Classes ---------------------------------------------------------------------------------------------------------


def load(connector: str | ConnectorEntry) -> type[Any]:
    """Import a connector's module and return its class, ready for vLLM to construct.

    The same class object comes back every time, whichever of its names is used: the class itself, or, where its
    construction has to be adapted, a subclass that differs in nothing else and has the same name and module.

    - vLLM calls `cls(vllm_config, role, kv_cache_config)`, and its base class demands `kv_cache_config` since 0.21.
      Where a class of the chain doesn't take that argument it is left out, and where one takes it and isn't given
      it, it is put in; so constructors written before 0.21 work, and those that derive from them.
    - A class that needs hooks is refused where these can't work (`kvplug.compat.require_hook_support`).

    Args:
        connector: A connector's name, or an entry from `kvplug.discovery.discover`.

    Raises:
        KvplugError: There is no such connector, it was skipped, its module can't be imported, or what it names isn't
            a connector class. The error that came from the module is its cause.

    """
    entry = _find(connector) if isinstance(connector, str) else connector
    who = f"Connector {entry.name!r} of {entry.source}"
    remedy = f"Update {entry.distribution}, install what it needs, or uninstall it."
    try:
        cls = functools.reduce(getattr, entry.attr.split("."), importlib.import_module(entry.module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a module that ends its process would end vLLM
        raise KvplugError(f"{who} can't be loaded from {entry.value} ({_said(error)}). {remedy}") from error
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if not (isinstance(cls, type) and issubclass(cls, KVConnectorBase_V1)):
        kind = f"class {cls.__qualname__}" if isinstance(cls, type) else type(cls).__name__
        raise KvplugError(
            f"{who} can't be used: {entry.value} is a {kind}, not a subclass of vLLM's KVConnectorBase_V1. {remedy}"
        )
    try:
        return _adapt(cls, KVConnectorBase_V1)
    except Exception as error:
        raise KvplugError(f"{who} can't be adapted to this vLLM ({_said(error)}). {remedy}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


# -- Construction ----------------------------------------------------------------------------------------------------

_ARGUMENT = "kv_cache_config"
# Where an adapted instance keeps its KV-cache configuration while its constructors run: with the instance, so that
# threads can't mix them up.
_PENDING = "_kvplug_kv_cache_config"

_adapted: dict[type, type] = {}


def _adapt(cls: type, base: type) -> type:
    """Return a class that can be constructed as `cls(vllm_config, role, kv_cache_config)`: `cls` itself if it can."""
    chain = cls.__mro__[: cls.__mro__.index(base) + 1]
    owners = [owner for owner in chain if "__init__" in vars(owner)]
    fits = all(_takes_three(owner) for owner in owners)
    if fits and not needed_hooks(cls):
        return cls
    found = _adapted.get(cls)
    # Of two threads that get here at once one makes a class in vain: setdefault is atomic.
    return found or _adapted.setdefault(cls, _subclass(cls, base, () if fits else owners[1:]))


def _subclass(cls: type, base: type, called: Sequence[type]) -> Any:
    """Make the adapted class.

    Args:
        cls: The connector's class.
        base: vLLM's base class.
        called: The classes whose constructors are called by those of others, in the order of resolution. A bridge
            comes right before each in the adapted class's order, so that it is what their `super().__init__` calls.

    """
    signature = _signature(cls)

    def __init__(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:  # noqa: N807
        from kvplug import compat

        compat.require_hook_support(vllm_config, role, cls)
        vars(self)[_PENDING] = kv_cache_config
        try:
            args, kwargs = _fitted(signature, (vllm_config, role, kv_cache_config), {}, kv_cache_config)
            super(adapted, self).__init__(*args, **kwargs)
        finally:
            vars(self).pop(_PENDING, None)

    # pickle finds classes by name, and under this name it finds the original: a metaclass of its own gives the adapted
    # class another way.
    metaclass = type(type(cls).__name__, (type(cls),), {})
    copyreg.pickle(metaclass, lambda _: (_adapt, (cls, base)))
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    adapted: Any = metaclass(cls.__name__, (cls, *map(_bridge, called)), {**names, "__init__": __init__})
    return adapted


def _bridge(owner: type) -> Any:
    """Make a class that stands before `owner` in the order of resolution and gives its constructor what it takes."""
    signature = _signature(owner)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if _PENDING in vars(self):
            args, kwargs = _fitted(signature, args, kwargs, vars(self)[_PENDING])
        super(bridge, self).__init__(*args, **kwargs)

    # No slots: with a dictionary of its own its layout could collide with the connector's.
    bridge: Any = type(owner)(owner.__name__, (owner,), {"__slots__": (), "__module__": __name__, "__init__": __init__})
    return bridge


def _signature(cls: type) -> inspect.Signature | None:
    try:
        return inspect.signature(cls.__init__)  # type: ignore[misc]
    except (TypeError, ValueError):
        return None  # compiled code that doesn't tell: vLLM's way of calling it is the best guess


def _takes_three(cls: type) -> bool:
    signature = _signature(cls)
    return signature is None or _binds(signature, (None, None, None), {})


def _binds(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError:
        return False
    return True


def _fitted(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any], config: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a constructor call's arguments, with the KV-cache configuration if it is taken and without it if not.

    Arguments that can't be made to fit that way come back as they are: Python's own error says what is wrong.
    """
    if signature is None:
        return args, kwargs
    with_config = {**kwargs, _ARGUMENT: config}
    without_config = {name: value for name, value in kwargs.items() if name != _ARGUMENT}
    calls = [(args, kwargs), (args, without_config)]
    if len(args) > 2 and args[2] is config:  # noqa: PLR2004 - it is the third
        calls += [(args[:2], with_config), (args[:2], without_config)]
    if _ARGUMENT in signature.parameters:
        calls.insert(0, (args, with_config))
    return next((call for call in calls if _binds(signature, *call)), (args, kwargs))
