"""The two-line hook that kvplug connectors need in vLLM's model runners, and the ways to deliver it.

`install()` is the default way: a finder on `sys.meta_path` that patches the two runner modules in memory as
they are imported. `kvplug-hooks export` prints the same patch as a unified diff.
"""

from __future__ import annotations

from kvplug_hooks.finder import PatchStatus, install, patched_modules, status, uninstall

__all__ = ["PatchStatus", "__version__", "install", "patched_modules", "status", "uninstall"]

__version__ = "0.1.0"
