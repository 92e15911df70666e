"""What a module's source, the release and the model say about patches, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kvplug_hooks.architectures import is_concerned
from kvplug_hooks.sites import Parsed, Site, refusal, survey, without_conflicts
from kvplug_hooks.versions import is_too_old

if TYPE_CHECKING:
    from packaging.version import Version

    from kvplug_hooks.patch import Patch
    from kvplug_hooks.source import SourceText

__all__ = ["excluded", "judge"]


def judge(
    source: SourceText,
    path: str,
    patches: Sequence[Patch],
    *,
    version: Version | None = None,
    architectures: Collection[str] | None = None,
) -> tuple[Parsed | None, list[Site]]:
    """Judge all patches of one module.

    Args:
        source: The module's source.
        path: Its file, relative to the folder that contains the `vllm` package.
        patches: The patches of this module.
        version: The release, if known. What is in the source counts for more than the number.
        architectures: The model's architectures; None if patches of all models are meant.

    Returns:
        The parsed module, or None if it isn't Python, and a site for each patch.

    """
    parsed, found = survey(source, path, patches)
    sites = [
        site
        if site.state == "already in source"
        else excluded(site.patch, source.text, path, version=version, architectures=architectures) or site
        for site in found
    ]
    return parsed, without_conflicts(sites, path)


def excluded(
    patch: Patch,
    text: str,
    path: str,
    *,
    version: Version | None,
    architectures: Collection[str] | None = None,
) -> Site | None:
    """Return the site of a patch that isn't in the source and for whose place nobody needs to look, else None.

    Args:
        patch: The patch.
        text: The module's source; nothing if it can't be read.
        path: As for `judge`, like the rest.
        version: The release, if known.
        architectures: The model's architectures; None if patches of all models are meant.

    """
    if architectures is not None and not is_concerned(patch, architectures):
        models = ", ".join(sorted(architectures)) or "a model without an architecture"
        return Site(patch, "not concerned", f"The patch {patch.id} doesn't concern {models}.")
    if is_too_old(version, patch):
        if patch.older_releases is not None:
            return Site(patch, "not needed", patch.older_releases)
        return Site(patch, "unsupported", str(refusal(patch, path, f"vLLM {version} is too old for it")))
    if patch.not_needed is None or not text:
        return None
    try:
        reason = patch.not_needed(text)
    except Exception as error:  # noqa: BLE001 - the check comes from whoever declares a patch
        problem = f"its check of whether it is needed fails ({error!r})"
        return Site(patch, "unsupported", str(refusal(patch, path, problem)))
    return None if reason is None else Site(patch, "not needed", reason)
