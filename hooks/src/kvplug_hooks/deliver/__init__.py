"""Delivery as a file: puts patches into the files of an installed vLLM, says where they stand, and takes them out."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvplug_hooks.deliver.manifest import manifest_path
from kvplug_hooks.deliver.operations import Vllm
from kvplug_hooks.deliver.report import Report
from kvplug_hooks.deliver.states import DeliveryError, Exit
from kvplug_hooks.deliver.survey import Standing
from kvplug_hooks.installed import installed

__all__ = ["DeliveryError", "Exit", "Report", "Standing", "Vllm", "apply_patches", "file_state"]


def apply_patches(
    python: str | Path | None = None,
    *,
    architectures: Collection[str] | None = None,
    patches: Collection[str] | None = None,
    require: bool = False,
) -> Report:
    """Put patches into the files of the vLLM that an interpreter would import, as `kvplug-hooks apply` does.

    For programs that prepare environments for models. May be called any number of times: what is there stays.

    Args:
        python: The interpreter, or the folder of its environment; None for the one that runs this.
        architectures: Architectures of the models that will be served, as vLLM resolves them. Patches that concern
            other models only are left out. None: all patches that the vLLM needs.
        patches: Ids of the patches to apply; None for all.
        require: Whether to refuse where one of them isn't needed or doesn't concern the models.

    Returns:
        Where each patch stands now, with the reason.

    Raises:
        kvplug_hooks.errors.PatchError: A patch doesn't fit.
        DeliveryError: The files can't be patched; `code` says what kind of refusal it is. In both cases nothing was
            changed.

    """
    return Vllm.of(python, patches=patches, architectures=architectures, require=require).apply()


def file_state() -> dict[str, Any] | None:
    """Return, for `kvplug doctor`, what became of the patches in the files of this interpreter's vLLM.

    Returns:
        `state` in a word (that of `kvplug-hooks verify`), `applied`, the ids of the patches that are in the files, and
        `reasons`, what is wrong, in sentences. None if `kvplug-hooks apply` was never used on this vLLM.

    """
    tree = installed()
    if tree is None or not manifest_path(tree.folder).exists():
        return None
    try:
        found = Vllm.of().verify()
    except DeliveryError as error:
        return {"state": error.code.word, "applied": [], "reasons": [str(error)]}
    wrong = [one.reason for one in found.patches if one.state not in ("applied", "not needed", "not concerned")]
    return {"state": found.state, "applied": list(found.applied), "reasons": [*wrong, *found.problems]}
