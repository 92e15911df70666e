"""Configuration objects as plain values that are equal in every process."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kvplug.errors import ConfigError

__all__ = ["canonical_json", "plain"]


def canonical_json(value: Any) -> bytes:
    """Encode plain values (see `plain`) as JSON that is equal to the byte for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def plain(value: Any, *, without: frozenset[str] = frozenset(), name: str = "value") -> Any:
    """Turn a configuration object into values for JSON, with nothing in them that differs from process to process.

    Args:
        value: Numbers, strings, containers of such, dtypes, enumerations, dataclasses, Hugging Face configurations, and
            other objects whose attributes are such values.
        without: Keys and attributes to leave out, at every depth.
        name: What the value is called in an error.

    Raises:
        ConfigError: Something has no content that could be compared, such as a function.

    """
    if isinstance(value, Mapping):
        return {
            str(key): plain(item, without=without, name=f"{name}.{key}")
            for key, item in value.items()
            if key not in without
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [plain(item, without=without, name=name) for item in value]
        return items if isinstance(value, (list, tuple)) else sorted(items, key=canonical_json)
    scalar = _scalar(value)
    if value is None or scalar is not None:
        return scalar
    return plain(_content(value, name), without=without, name=name)


def _scalar(value: Any) -> str | float | None:
    """Return what JSON has a word for, or None."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    # A string may be of a class with more in it than its text.
    if isinstance(value, (str, Fraction)):
        return str(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return None


def _content(value: Any, name: str) -> Any:
    """Return an object's content as a mapping."""
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "__dict__") and not callable(value):
        return vars(value)
    raise ConfigError(
        f"{name} is a {type(value).__name__}, whose content can't be part of a block's key; replace it by plain values."
    )
