"""Connector classes that have no module to be imported from, under names that vLLM can look up here."""

from __future__ import annotations

from typing import Any

__all__ = ["kv_transfer", "reference"]

_classes: dict[str, type] = {}


def reference(cls: type, extra_config: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the entry of a class for vLLM's `kv_transfer_config`, or for the list of a `MultiConnector`.

    Args:
        cls: A connector class; it may be local to a function.
        extra_config: Its `kv_connector_extra_config`.
        **options: More of the entry's keys.
    """
    name = next((name for name, known in _classes.items() if known is cls), "")
    if not name:
        name = cls.__name__ if cls.__name__ not in _classes else f"{cls.__name__}_{len(_classes)}"
        _classes[name] = cls
    return {
        "kv_connector": name,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra_config or {}),
        **options,
    }


def kv_transfer(
    connector: str | type | dict[str, Any] | None, extra_config: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return vLLM's `kv_transfer_config` for a connector's name, its class, or that dict itself."""
    if connector is None or isinstance(connector, dict):
        return connector
    if isinstance(connector, type):
        return reference(connector, extra_config)
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra_config or {}),
    }


def __getattr__(name: str) -> type:
    try:
        return _classes[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
