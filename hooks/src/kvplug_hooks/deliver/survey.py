"""Where each patch stands in the files of one vLLM, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvplug_hooks.architectures import is_concerned
from kvplug_hooks.deliver.files import File, Files
from kvplug_hooks.deliver.originals import Originals
from kvplug_hooks.deliver.states import DeliveryError, Exit, State
from kvplug_hooks.plan import Planned, plan

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["Standing", "Survey", "check_selection", "name_of", "survey"]


@dataclass(frozen=True)
class Standing:
    """Where one patch stands."""

    patch: str
    #: The module that it is for; empty where nobody knows the patch.
    module: str
    #: The module's file, relative to the folder that contains the package; None if there is none.
    path: str | None
    state: State
    #: One sentence, or several.
    reason: str


@dataclass(frozen=True)
class Survey:
    """Where the patches in question stand, and what to make of it."""

    files: Files
    #: The originals, as patches see them.
    tree: Originals
    #: In the order of the registry.
    standings: tuple[Standing, ...]
    #: What the originals say about the patches in question that are concerned, and those that are in the files.
    planned: tuple[Planned, ...]


def survey(
    files: Files,
    known: Sequence[Patch],
    selection: Collection[str] | None = None,
    architectures: Collection[str] | None = None,
) -> Survey:
    """Look at the files, and judge each patch by their originals.

    Args:
        files: What is there.
        known: All patches.
        selection: Ids of those in question; None for those that were asked for when this vLLM was patched, or else all.
        architectures: Those of the models that will be served; None for any.

    """
    ids = _selected(files, known, selection)
    kept = {name for file in files.patched.values() if file.entry for name in file.entry.patches}
    tree = Originals.of(files)
    judged = [
        patch
        for patch in known
        if patch.id in kept or (patch.id in ids and (architectures is None or is_concerned(patch, architectures)))
    ]
    planned = {one.patch.id: one for one in plan(tree, judged)}
    standings = []
    for patch in known:
        if patch.id not in ids:
            continue
        if patch.id in planned:
            standings.append(_standing(files, planned[patch.id]))
        else:
            reason = f"None of the architectures asked for ({_list(architectures or ())}) is concerned."
            standings.append(Standing(patch.id, patch.module, None, "not concerned", reason))
    standings += [_unknown(files, name) for name in ids if name not in {patch.id for patch in known}]
    return Survey(files, tree, tuple(standings), tuple(planned.values()))


def check_selection(known: Sequence[Patch], selection: Collection[str] | None) -> None:
    """See that all patches in question exist.

    Raises:
        DeliveryError: One doesn't.

    """
    names = [patch.id for patch in known]
    if missing := [name for name in selection or () if name not in names]:
        raise DeliveryError(f"There is no patch {_list(missing)}; name one of {_list(names)}.", Exit.USAGE)


def _selected(files: Files, known: Sequence[Patch], selection: Collection[str] | None) -> list[str]:
    if selection is not None:
        return list(selection)
    if files.manifest is not None and files.manifest.asked:
        return list(files.manifest.asked)
    return [patch.id for patch in known]


def _standing(files: Files, planned: Planned) -> Standing:
    patch = planned.patch
    name = None if planned.path is None else name_of(files, planned)
    file = None if name is None else files.file(name)
    state, reason = _state(files, planned, file)
    return Standing(patch.id, planned.module, name, state, reason)


def _state(files: Files, planned: Planned, file: File | None) -> tuple[State, str]:
    recorded = file is not None and file.entry is not None and planned.patch.id in file.entry.patches
    if file is None or (planned.state == "not needed" and not (file.patched and recorded)):
        return _plain(planned)
    if file.patched and recorded:
        return "applied", f"{file.name} has it, as kvplug-hooks wrote it."
    if planned.state == "already in source" and file.entry is None:
        return "applied", f"{file.name} has it, but not from `kvplug-hooks apply`, which so can't revert it."
    if file.drifted:
        installed = f"what {files.target.owner} installed"
        what = f"neither what kvplug-hooks wrote nor {installed}" if recorded else f"not {installed}"
        remedy = "Reinstall vLLM, then run `kvplug-hooks apply`."
        return "drifted", f"{file.path} is {what}: somebody changed it. {remedy}"
    if planned.state == "fits" and recorded:
        return "absent", _why_gone(files, file)
    return _plain(planned)


def _plain(planned: Planned) -> tuple[State, str]:
    """Return what was planned, as where a patch stands."""
    states: dict[str, State] = {"fits": "absent", "already in source": "applied"}
    return states.get(planned.state, cast("State", planned.state)), planned.reason


def _why_gone(files: Files, file: File) -> str:
    manifest, version = files.manifest, files.target.version
    if manifest is not None and manifest.vllm != version:
        return (
            f"vLLM was {manifest.vllm} when {file.name} was patched, and is {version} now, without the patch. "
            "Run `kvplug-hooks apply` again."
        )
    return (
        f"{file.name} was to be patched and is the original: vLLM was reinstalled, or `kvplug-hooks apply` was "
        "interrupted. Run it again."
    )


def _unknown(files: Files, name: str) -> Standing:
    for file in files.patched.values():
        if file.entry and name in file.entry.patches:
            return Standing(name, "", file.name, "applied", f"{file.name} has it, as kvplug-hooks wrote it.")
    return Standing(
        name,
        "",
        None,
        "unsupported",
        "It was asked for, and no patch of this name is installed any more; install the distribution that has it, or "
        "run `kvplug-hooks revert`.",
    )


def name_of(files: Files, planned: Planned) -> str:
    """Return the name of the file that a patch goes into, as the manifest and RECORD have it."""
    assert planned.path is not None, "a patch without a file goes nowhere"
    return planned.path.relative_to(files.target.tree.folder).as_posix()


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
