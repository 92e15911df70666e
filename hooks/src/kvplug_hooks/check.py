"""Tells whether the patches fit the installed vLLM, from its source alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvplug_hooks.edit import inline
from kvplug_hooks.errors import PatchError
from kvplug_hooks.export import is_too_old

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplug_hooks.installed import Tree
    from kvplug_hooks.patch import Patch

__all__ = ["Check", "check"]


@dataclass(frozen=True)
class Check:
    """How a patch and a vLLM go together."""

    patch: str
    module: str
    state: Literal["fits", "already in source", "doesn't fit", "not concerned"]
    #: One sentence.
    reason: str

    @property
    def ok(self) -> bool:
        """Whether a connector can have the hook in this model runner, or this vLLM has no use for it."""
        return self.state != "doesn't fit"


def check(patches: Sequence[Patch], tree: Tree) -> list[Check]:
    """Try each patch on the source in `tree`, in memory."""
    return [_check(patch, tree) for patch in patches]


def _check(patch: Patch, tree: Tree) -> Check:
    if tree.version is not None and is_too_old(tree.version, patch):
        return Check(patch.id, patch.module, "not concerned", f"The patch is for vLLM {patch.releases}.")
    try:
        edit = inline(tree.source(patch), patch, patch.path)
    except PatchError as error:
        return Check(patch.id, patch.module, "doesn't fit", str(error))
    if edit is None:
        return Check(patch.id, patch.module, "already in source", f"{patch.path} contains the hook.")
    line = edit.insertions[-1].line
    return Check(patch.id, patch.module, "fits", f"The call goes into {patch.function} at line {line}.")
