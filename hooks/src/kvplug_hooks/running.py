"""Finds out, in a process of vLLM's, which model it runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvplug_hooks.architectures import is_concerned
from kvplug_hooks.status import note

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["architectures_of", "concerns_model", "running_config"]


def concerns_model(patch: Patch) -> bool:
    """Return whether a patch concerns the model for which its code is being called right now.

    For the function that a patch calls: in memory and in files, a patch is in place for all models. If the model isn't
    one of the patch's, `kvplug_hooks.status()` says so from then on. A model that can't be told isn't concerned.
    """
    config = running_config()
    names = () if config is None else architectures_of(config)
    if names and is_concerned(patch, names):
        note(patch.id, None)
        return True
    model = ", ".join(names) or "one whose architecture can't be told"
    note(patch.id, f"The patch is in place, and does nothing for this process's model ({model}).")
    return False


def running_config() -> Any | None:
    """Return the `VllmConfig` that the code of vLLM's that is running works for, or None.

    It is looked for in the variables of the callers. vLLM has a context for it, `set_current_vllm_config`, but its
    engine core works outside of that; whoever works for a model has its configuration at hand, as a variable
    or an attribute of that name, in every release.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        for owner in (frame.f_locals, getattr(frame.f_locals.get("self"), "__dict__", {})):
            config = owner.get("vllm_config")
            if getattr(config, "model_config", None) is not None:
                return config
        frame = frame.f_back  # type: ignore[assignment]
    return None


def architectures_of(vllm_config: Any) -> tuple[str, ...]:
    """Return the names of a model's architecture: what its configuration says, and what vLLM made of it."""
    model = vllm_config.model_config
    names = [*(getattr(model, "architectures", None) or ()), getattr(model, "architecture", None)]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))
