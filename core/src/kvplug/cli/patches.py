"""What kvplug-hooks, where it is installed, says about patches of vLLM's: for `kvplug.cli.probe`, in its process."""

from __future__ import annotations

import importlib.util
from typing import Any

__all__ = ["files", "hook_status", "patches"]


def files() -> dict[str, Any]:
    """Say what became of patches that `kvplug-hooks apply` put into vLLM's files; no state if there are none."""
    if importlib.util.find_spec("kvplug_hooks") is None:
        return {"state": None}
    from kvplug_hooks.deliver import file_state

    return file_state() or {"state": None}


def patches() -> dict[str, Any]:
    """Say for each patch but the hook what vLLM's files allow, and which declarations can't be used."""
    if importlib.util.find_spec("kvplug_hooks") is None:
        return {"others": [], "rejected": []}
    from kvplug_hooks.check import check
    from kvplug_hooks.installed import installed
    from kvplug_hooks.patches.before_update_states import BY_RUNNER
    from kvplug_hooks.registry import load

    registry, tree = load(), installed()
    hook = {patch.id for patch in BY_RUNNER.values()}
    # All of them are judged, since one that isn't the hook may want the hook's place.
    checks = [] if tree is None else check(registry.patches, tree)
    return {
        "others": [
            {"patch": one.patch, "state": one.state, "reason": one.reason, "ok": one.ok}
            for one in checks
            if one.patch not in hook
        ],
        "rejected": [one.reason for one in registry.rejected],
    }


def hook_status(module: str, *, imported: bool) -> str:
    """Return what kvplug-hooks says about a module: that it was imported with, or what its source allows."""
    if imported:
        from kvplug_hooks import status

        return " ".join(entry.reason for entry in status().values() if entry.module == module)
    from kvplug_hooks.check import check
    from kvplug_hooks.installed import installed
    from kvplug_hooks.patches import all_patches

    tree = installed()
    checks = [] if tree is None else check([patch for patch in all_patches() if patch.module == module], tree)
    return " ".join(check.reason for check in checks)
