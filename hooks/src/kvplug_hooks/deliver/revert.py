"""Takes patches out of a vLLM's files, so that these are what the installer put there, to the byte."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvplug_hooks.deliver.files import File, Files
from kvplug_hooks.deliver.goal import Goal
from kvplug_hooks.deliver.manifest import PatchedFile, added_lines, digest
from kvplug_hooks.deliver.originals import Originals, patched_texts
from kvplug_hooks.deliver.states import DeliveryError, Exit
from kvplug_hooks.plan import plan

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["reverted_goal"]


def reverted_goal(files: Files, known: Sequence[Patch], selection: Collection[str] | None = None) -> Goal:
    """Return the goal that patches are out of the files.

    What kvplug-hooks wrote is enough to undo it, so this needs neither the patches nor their packages, unless a file
    has patches that are to stay.

    Args:
        files: What is there.
        known: All patches.
        selection: Ids of those to take out; None for all.

    Raises:
        DeliveryError: A file was changed since it was patched, so its original isn't known.
        PatchError: A patch that is to stay doesn't fit any more.

    """
    manifest = files.manifest
    if manifest is None:
        return Goal(files, {}, {}, None)
    before: dict[str, File] = {}
    after: dict[str, bytes] = {}
    entries: dict[str, PatchedFile] = {}
    for name, entry in manifest.files.items():
        file = files.file(name)
        stay = [] if selection is None else [patch for patch in entry.patches if patch not in selection]
        if file is None:
            continue  # the file went with an upgrade of vLLM
        if len(stay) == len(entry.patches):
            entries[name] = entry
            continue
        if file.original is None:
            raise DeliveryError(
                f"{file.path} was changed since kvplug-hooks patched it, so its original can't be restored; reinstall "
                "vLLM, then run `kvplug-hooks revert` again.",
                Exit.DRIFTED,
            )
        before[name], after[name] = file, file.original
        if stay and file.patched:
            after[name] = _with_only(files, known, name, stay)
            entries[name] = replace(
                entry,
                patches=tuple(stay),
                patched=digest(after[name]),
                added_lines=added_lines(file.original, after[name]),
            )
    asked = () if selection is None else tuple(name for name in manifest.asked if name not in selection)
    return Goal(files, before, after, replace(manifest, asked=asked, files=entries) if entries else None)


def _with_only(files: Files, known: Sequence[Patch], name: str, stay: Sequence[str]) -> bytes:
    tree = Originals.of(files)
    planned = plan(tree, [patch for patch in known if patch.id in stay])
    if len(planned) != len(stay) or any(one.state != "fits" for one in planned):
        raise DeliveryError(
            f"{name} has the patches {', '.join(stay)}, too, which this kvplug-hooks can't put there again; run "
            "`kvplug-hooks revert` for all.",
            Exit.UNSUPPORTED,
        )
    return patched_texts(tree, planned)[name]
