"""Puts patches into a vLLM's files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvplug_hooks import __version__
from kvplug_hooks.deliver.files import File
from kvplug_hooks.deliver.goal import Goal
from kvplug_hooks.deliver.manifest import Manifest, PatchedFile, added_lines, digest
from kvplug_hooks.deliver.originals import patched_texts
from kvplug_hooks.deliver.states import DeliveryError, Exit, State, overall
from kvplug_hooks.deliver.survey import Survey, name_of
from kvplug_hooks.plan import Planned

__all__ = ["applied_goal", "refuse", "why_not_importable"]

_REFUSED: tuple[State, ...] = ("drifted", "conflict", "unsupported")


def applied_goal(survey: Survey) -> Goal:
    """Return the goal that all patches in question are in the files, each exactly once.

    Raises:
        DeliveryError: The result isn't valid for the interpreter, or would take out a patch that isn't in question.
        PatchError: A patch doesn't fit after all.

    """
    wanted = {one.patch for one in survey.standings if one.state in ("absent", "applied")}
    fitting = [one for one in survey.planned if one.state == "fits"]
    # All patches of a file are made together, from the original.
    names = {name_of(survey.files, one) for one in fitting if one.patch.id in wanted}
    together = [one for one in fitting if name_of(survey.files, one) in names]
    after = patched_texts(survey.tree, together)
    before = {name: _existing(survey, name) for name in after}
    patches = {name: _patches(survey, together, name) for name in after}
    _keep_others(before, patches)
    changed = {name: data for name, data in after.items() if data != before[name].data}
    if changed and (problem := survey.files.target.why_not_valid(changed)):
        raise DeliveryError(
            f"{survey.files.target.python} can't compile the patched files ({problem}); use a newer kvplug-hooks.",
            Exit.UNSUPPORTED,
        )
    return Goal(survey.files, before, after, _manifest(survey, before, after, patches))


def refuse(survey: Survey, *, require: bool) -> None:
    """Refuse to apply if a patch can't be.

    Raises:
        DeliveryError: A patch drifted, is in conflict or is unsupported; one isn't needed but required; or the
            interpreter hasn't got the patches' other end.

    """
    wrong = [one for one in survey.standings if one.state in _REFUSED]
    if wrong:
        lines = [one.reason for one in wrong]
        fine = [one.patch for one in survey.standings if one.state in ("absent", "applied")]
        if fine and all(one.state == "unsupported" for one in wrong):
            lines.append(
                f"Nothing was changed; to apply just what fits, say {' '.join(f'--patch {name}' for name in fine)}."
            )
        raise DeliveryError("\n".join(lines), overall([one.state for one in wrong]))
    skipped = [one for one in survey.standings if one.state in ("not needed", "not concerned")]
    if require and skipped:
        reasons = " ".join(f"{one.patch} is {one.state}: {one.reason}" for one in skipped)
        raise DeliveryError(f"{reasons} Leave out --require, or the patch.", Exit.NOT_NEEDED)
    if reason := why_not_importable(survey, "absent", "applied"):
        raise DeliveryError(reason, Exit.INCOMPLETE)


def why_not_importable(survey: Survey, *states: State) -> str | None:
    """Return why the interpreter couldn't import modules with the patches of these states, or None if it can."""
    there = {one.patch for one in survey.standings if one.state in states}
    packages = {one.patch.import_from.partition(".")[0] for one in survey.planned if one.patch.id in there}
    target = survey.files.target
    missing = sorted(packages.intersection(target.missing))
    if not missing:
        return None
    return (
        f"{target.python} has no {' and no '.join(missing)}, which a patched vLLM imports, so vLLM would not start; "
        f"install {' and '.join(missing)} there."
    )


def _existing(survey: Survey, name: str) -> File:
    file = survey.files.file(name)
    if file is None:
        raise DeliveryError(f"{name} is gone; another program changes this vLLM, try again.", Exit.FAILED)
    return file


def _patches(survey: Survey, planned: Sequence[Planned], name: str) -> tuple[str, ...]:
    return tuple(one.patch.id for one in planned if name_of(survey.files, one) == name)


def _keep_others(before: Mapping[str, File], patches: Mapping[str, Collection[str]]) -> None:
    for name, file in before.items():
        if file.patched and file.entry and (lost := set(file.entry.patches).difference(patches[name])):
            raise DeliveryError(
                f"{name} has the patch {', '.join(sorted(lost))}, which this kvplug-hooks can't put there again; run "
                "`kvplug-hooks revert` first.",
                Exit.UNSUPPORTED,
            )


def _manifest(
    survey: Survey, before: Mapping[str, File], after: Mapping[str, bytes], patches: Mapping[str, tuple[str, ...]]
) -> Manifest | None:
    files = {name: file.entry for name, file in survey.files.patched.items() if file.entry is not None}
    for name, data in after.items():
        original = survey.tree.read(name).data
        files[name] = PatchedFile(
            patches=patches[name],
            original=digest(original),
            patched=digest(data),
            added_lines=added_lines(original, data),
            record_line=_record_line(survey, before[name]),
        )
    if not files:
        return None
    old = survey.files.manifest
    asked = [one.patch for one in survey.standings if one.state != "not concerned"]
    return Manifest(
        kvplug_hooks=__version__,
        vllm=survey.files.target.version,
        distribution=str(survey.files.target.owner),
        asked=tuple(dict.fromkeys([*(old.asked if old else ()), *asked])),
        files=dict(sorted(files.items())),
    )


def _record_line(survey: Survey, file: File) -> str | None:
    """Return the line of RECORD that the installer wrote for the original."""
    record = survey.files.record
    if file.entry is not None and (file.patched or file.vouched_for is False):
        return file.entry.record_line
    return None if record is None else record.line(file.name)
