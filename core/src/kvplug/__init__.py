"""KV-cache connectors for vLLM as installable parts.

What a connector's author needs is here: mark methods with `hookimpl`, read the `Step` they are given, and require
a `HOOK_API` that has what is used. Everything else is in the modules.
"""

from __future__ import annotations

from kvplug.hookspecs import HOOK_API, hookimpl
from kvplug.step import Step, StepRequest

__all__ = ["HOOK_API", "Step", "StepRequest", "__version__", "hookimpl"]

__version__ = "0.1.0"
