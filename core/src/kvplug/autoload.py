"""Make installed connectors known to vLLM: the function that vLLM calls in each of its processes.

vLLM calls the entry points of the group `vllm.general_plugins` in its front end, its engine core and its workers,
and an exception there ends it, also for people who use no connector. So `register` raises nothing, and what it
skips or what fails is kept for `report`, which `kvplug doctor` prints.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvplug.discovery import ConnectorEntry, Discovery, SkippedEntry, discover
from kvplug.log import get_logger

__all__ = ["AutoloadReport", "add", "foreign_names", "register", "report"]

logger = get_logger(__name__)


@dataclass(frozen=True)
class AutoloadReport:
    """What `register` did last."""

    #: Process it ran in; None if it never ran. Another one's if this process was forked from that one.
    pid: int | None = None
    #: Connectors that vLLM knows through kvplug.
    registered: tuple[ConnectorEntry, ...] = ()
    #: What isn't used, with reasons.
    skipped: tuple[SkippedEntry, ...] = ()
    #: How the finder that delivers the hook stands: `installed`, `absent` (kvplug-hooks isn't installed) or `failed`.
    hooks: str = "absent"
    #: What went wrong, in the order it did.
    errors: tuple[str, ...] = ()


_report = AutoloadReport()
# What this module put into vLLM's registry, by name.
_loaders: dict[str, Callable[[], type]] = {}
_lock = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread that held it in the parent doesn't exist there."""
    global _lock  # noqa: PLW0603 - it is what has to be replaced
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def register() -> None:
    """Register all discovered connectors with vLLM, lazily, and install the hook's finder.

    This is kvplug's entry point in `vllm.general_plugins`. It may be called any number of times, in a forked or
    a spawned process alike: what is there is found there and stays. No connector is imported.

    A name that can't be used is registered too, so that who asks vLLM for it is told why, unless
    vLLM has that name itself: vLLM's own connectors are never touched.

    Never raises.
    """
    global _report  # noqa: PLW0603 - one report per process
    errors: list[str] = []
    # The finder first: what is imported next may import what it patches.
    hooks = _install_hooks(errors)
    done = Discovery()
    try:
        with _lock:
            done = _register_connectors()
    except Exception as error:  # noqa: BLE001 - see the module's docstring
        errors.append(f"Registering connectors with vLLM failed ({type(error).__name__}: {error}).")
    _report = AutoloadReport(os.getpid(), done.entries, done.skipped, hooks, tuple(errors))
    if errors:
        logger.warning("kvplug could not do all it should: %s `kvplug doctor` says more.", " ".join(errors))


def add(entry: ConnectorEntry) -> None:
    """Register one more name for a connector, if vLLM doesn't know that name."""
    global _report  # noqa: PLW0603 - see register
    from kvplug import connectors

    with _lock:
        if entry.name not in _registry():
            _report = replace(_report, registered=(*_report.registered, entry))
            connectors.publish_also(entry)
            _register_name(entry.name)


def report() -> AutoloadReport:
    """Return what `register` did in this process, or in the one that it was forked from."""
    return _report


def foreign_names() -> frozenset[str]:
    """Return the connector names that vLLM has from elsewhere: its own, and those of other plugins."""
    return frozenset(name for name, loader in _registry().items() if _loaders.get(name) is not loader)


def _install_hooks(errors: list[str]) -> str:
    try:
        if importlib.util.find_spec("kvplug_hooks") is None:
            return "absent"
        import kvplug_hooks

        kvplug_hooks.install()
    except Exception as error:  # noqa: BLE001 - see the module's docstring
        errors.append(f"The hook's finder can't be installed ({type(error).__name__}: {error}).")
        return "failed"
    return "installed"


def _register_connectors() -> Discovery:
    from kvplug import connectors

    found = discover()
    theirs = foreign_names()
    entries = tuple(entry for entry in found.entries if entry.name not in theirs)
    taken = tuple(
        SkippedEntry(
            entry.name,
            entry.distribution,
            entry.version,
            f"vLLM already has a connector {entry.name!r}, which {entry.value} can't replace: use another name of it.",
        )
        for entry in found.entries
        if entry.name in theirs
    )
    done = Discovery(entries, found.skipped + taken)
    connectors.publish(done)
    names = [entry.name for entry in done.entries] + [entry.name for entry in done.skipped]
    for name in names:
        if name and name not in _registry():
            _register_name(name)
    return done


def _registry() -> dict[str, Callable[[], type]]:
    """Return vLLM's table of connectors.

    Each process that runs an engine has imported its module by the time plugins are loaded; the command line's parser
    imports it a moment later in any case.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry: Any = KVConnectorFactory._registry  # noqa: SLF001 - there is no other way to ask, in any release
    return registry  # type: ignore[no-any-return]


def _register_name(name: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvplug import connectors

    KVConnectorFactory.register_connector(name, connectors.__name__, connectors.attribute(name))
    _loaders[name] = _registry()[name]
