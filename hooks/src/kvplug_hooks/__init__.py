"""Small patches of vLLM, the two-line hook that kvplug connectors need among them, and the ways to deliver them.

`install()` is the default way: a finder on `sys.meta_path` that patches modules in memory as they are imported.
`apply_patches()` and `kvplug-hooks apply` change the files of an installed vLLM. `kvplug-hooks export` prints the
hook's patch as a unified diff. `Patch` and the anchors are what a patch is declared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplug_hooks.finder import install, uninstall
from kvplug_hooks.patch import Before, FirstIn, FirstStatement, Patch
from kvplug_hooks.report import patched_modules, status
from kvplug_hooks.status import PatchStatus

if TYPE_CHECKING:
    from kvplug_hooks.deliver import apply_patches
    from kvplug_hooks.running import concerns_model

__all__ = [
    "Before",
    "FirstIn",
    "FirstStatement",
    "Patch",
    "PatchStatus",
    "__version__",
    "apply_patches",
    "concerns_model",
    "install",
    "patched_modules",
    "status",
    "uninstall",
]

__version__ = "0.1.0"

#: Where the rest is: it imports what vLLM's processes have no use for.
_LAZY = {"apply_patches": "kvplug_hooks.deliver", "concerns_model": "kvplug_hooks.running"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
