"""Tells whether the patches fit the installed vLLM, from its source alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplug_hooks.plan import plan
from kvplug_hooks.sites import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplug_hooks.installed import Tree
    from kvplug_hooks.patch import Patch

__all__ = ["Check", "check"]


@dataclass(frozen=True)
class Check:
    """How a patch and a vLLM go together, in words."""

    patch: str
    module: str
    state: State
    #: One sentence.
    reason: str

    @property
    def ok(self) -> bool:
        """Whether this vLLM can have the patch, has it, or has no use for it."""
        return self.state not in ("unsupported", "conflict")


def check(patches: Sequence[Patch], tree: Tree) -> list[Check]:
    """Try each patch on the source in `tree`, in memory."""
    return [Check(entry.patch.id, entry.module, entry.state, entry.reason) for entry in plan(tree, patches)]
