"""Where each patch stands in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["ImportState", "PatchStatus", "Record", "note", "notes"]

ImportState = Literal[
    "not installed",
    "pending",
    "applied",
    "already in source",
    "not needed",
    "not concerned",
    "failed",
    "too late",
]


@dataclass(frozen=True)
class PatchStatus:
    """Where a patch stands in this process."""

    #: The patch's id.
    patch: str
    #: Dotted name of the module that has it, or is to have it.
    module: str
    state: ImportState
    #: One sentence.
    reason: str

    @property
    def live(self) -> bool:
        """Whether the module is loaded and has the patch, and the patch has something to do."""
        return self.state in ("applied", "already in source")


class Record(Protocol):
    """Is told what became of a patch in a module, and why."""

    def __call__(self, patch: Patch, module: str, state: ImportState, reason: str, /) -> None:
        """Remember it."""
        ...


#: What patches that were called have found out about the model, by id.
_notes: dict[str, str] = {}


def note(patch_id: str, reason: str | None) -> None:
    """Remember that a patch doesn't concern the model of this process, and why; None: it does."""
    if reason is None:
        _notes.pop(patch_id, None)
    else:
        _notes[patch_id] = reason


def notes() -> dict[str, str]:
    """Return the patches that don't concern the model of this process, with reasons."""
    return dict(_notes)
