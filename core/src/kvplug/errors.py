"""Errors that a user of kvplug sees.

Each message is one clear sentence that ends with what to do about it.
"""

from __future__ import annotations

__all__ = ["ConfigError", "KvplugError", "UnsupportedError"]


class KvplugError(Exception):
    """Base of the errors that kvplug raises on purpose."""


class ConfigError(KvplugError, ValueError):
    """A setting is unknown, malformed, or asks for more than there is."""


class UnsupportedError(KvplugError, RuntimeError):
    """What was asked for can't work here: this vLLM, this model runner, this parallelism, this cache layout."""
