"""Looks for what is wrong around patched modules, where the modules themselves are right."""

from __future__ import annotations

from collections.abc import Iterator

from kvplug_hooks.deliver import bytecode
from kvplug_hooks.deliver.apply import why_not_importable
from kvplug_hooks.deliver.atomic import leftover
from kvplug_hooks.deliver.survey import Survey

__all__ = ["problems"]


def problems(survey: Survey) -> Iterator[str]:
    """Yield what is wrong, each in a sentence. Nothing is changed.

    That the modules are, to the byte, what kvplug-hooks wrote is in the survey already.
    """
    if reason := why_not_importable(survey, "applied"):
        yield reason
    files = survey.files
    patched = list(files.patched.values())
    for file in patched:
        if file.vouched_for is False:
            yield (
                f"RECORD of {files.target.owner} has another hash of {file.name}: `kvplug-hooks apply` was "
                "interrupted, or something else wrote RECORD; run `kvplug-hooks apply` again."
            )
        if leftover(file.path).exists():
            yield f"{leftover(file.path)} was left by an interrupted operation; run `kvplug-hooks apply` again."
        for path in bytecode.stale(file.path, file.data, files.target.pycache_prefix):
            yield f"{path} is bytecode of another {file.path.name}, and may be run in its place; remove it."
    if reason := files.target.why_not_valid({file.name: file.data for file in patched}):
        yield f"{files.target.python} can't compile the patched files ({reason}); run `kvplug-hooks revert`."
