"""Prepares the patched source of one module for delivery in memory, as cheaply as is safe."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvplug_hooks.edit import Edit, insert
from kvplug_hooks.errors import PatchError
from kvplug_hooks.judge import excluded, judge
from kvplug_hooks.outline import mentions_function, outline
from kvplug_hooks.patch import path_of
from kvplug_hooks.reading import loaded_version
from kvplug_hooks.sites import Parsed, Site, locate, without_conflicts

if TYPE_CHECKING:
    from packaging.version import Version

    from kvplug_hooks.patch import Patch
    from kvplug_hooks.sites import State
    from kvplug_hooks.source import SourceText
    from kvplug_hooks.status import ImportState, Record

__all__ = ["Prepared", "choose", "other_end", "prepare"]


def choose(
    source: SourceText,
    module: str,
    patches: Sequence[Patch],
    *,
    filename: str,
    record: Record,
    refuse: Callable[[Edit, Patch], str | None],
) -> tuple[Edit, list[Patch]] | None:
    """Make the edit of a module with all patches that can be applied, and record what becomes of the others.

    Args:
        source: The module's source.
        module: Its dotted name.
        patches: Patches that may be for it.
        filename: The file name that the code gets.
        record: Is told of patches that aren't applied.
        refuse: Says why a patch can't be applied after all, or returns None.

    Returns:
        The edit and the patches in it, or None if there are none.

    """
    left = []
    for patch in patches:
        if len(patch.modules) == 1 or mentions_function(source.text, patch):
            left.append(patch)
        else:
            record(patch, module, "pending", f"{module} has no {patch.function}.")
    while left:
        prepared = prepare(source, path_of(module), left, filename=filename, version=loaded_version())
        for site in prepared.sites:
            if site.state != "fits":
                record(site.patch, module, _STATES[site.state], site.reason)
        if prepared.edit is None:
            return None
        fitting = [site.patch for site in prepared.sites if site.state == "fits"]
        left = []
        for patch in fitting:
            reason = refuse(prepared.edit, patch)
            if reason is None:
                left.append(patch)
            else:
                record(patch, module, "failed", reason)
        if left == fitting:
            return prepared.edit, fitting
    return None


def other_end(patch: Patch) -> Any:
    """Import what a patch calls: if that fails, it must show before vLLM's own code gets to it.

    Raises:
        PatchError: It can't be imported.

    """
    namespace: dict[str, Any] = {}
    try:
        exec(patch.import_line, namespace)  # noqa: S102 - the very statement that is inserted
    except Exception as error:
        distribution = patch.import_from.partition(".")[0].replace("_", "-")
        raise PatchError(f"`{patch.import_line}` fails ({error!r}); reinstall {distribution}.") from error
    return namespace[patch.import_name]


#: What a site comes to in a process.
_STATES: dict[State, ImportState] = {
    "already in source": "already in source",
    "not needed": "not needed",
    "not concerned": "not concerned",
    "unsupported": "failed",
    "conflict": "failed",
}


@dataclass(frozen=True)
class Prepared:
    """What becomes of a module's patches."""

    #: One site per patch, in their order. Those that fit are in `edit`.
    sites: tuple[Site, ...]
    #: None if there is nothing to insert.
    edit: Edit | None


def prepare(
    source: SourceText, path: str, patches: Sequence[Patch], *, filename: str, version: Version | None
) -> Prepared:
    """Judge the patches of a module, and insert those that fit without moving a line.

    Args:
        source: The module's source.
        path: Its file for messages, relative to the folder that contains the `vllm` package.
        patches: The patches that are for this module.
        filename: The file name that the code gets.
        version: vLLM's release, if known.

    """
    with _no_collection():
        prepared = _quickly(source, path, patches, filename, version)
        if prepared is None:
            parsed, sites = judge(source, path, patches, version=version)
            prepared = Prepared(tuple(sites), None) if parsed is None else _insert(parsed, sites, filename)
    return prepared


def _quickly(
    source: SourceText, path: str, patches: Sequence[Patch], filename: str, version: Version | None
) -> Prepared | None:
    """Prepare a module without parsing all of it; None if that would leave a question open."""
    if any(patch.import_name in source.text for patch in patches):
        return None  # it is there already, or its name is taken
    sites = {patch.id: excluded(patch, source.text, path, version=version) for patch in patches}
    wanted = [patch for patch in patches if sites[patch.id] is None]
    if not wanted:
        return Prepared(tuple(site for site in sites.values() if site is not None), None)
    parsed = outline(source, path, wanted)
    if parsed is None:
        return None
    for site in without_conflicts(locate(parsed, wanted), path):
        if site.state == "unsupported":
            return None
        sites[site.patch.id] = site
    prepared = _insert(parsed, [site for site in sites.values() if site is not None], filename)
    return None if any(site.state == "unsupported" for site in prepared.sites) else prepared


def _insert(parsed: Parsed, sites: Sequence[Site], filename: str) -> Prepared:
    """Insert the patches that fit; one that turns out not to fit isn't in the way of the others."""
    fitting = [site for site in sites if site.state == "fits"]
    if not fitting:
        return Prepared(tuple(sites), None)
    try:
        return Prepared(tuple(sites), insert(parsed, fitting, "inline", filename))
    except PatchError as error:
        if len(fitting) == 1:
            failed = {fitting[0].patch.id: str(error)}
        else:
            failed = {site.patch.id: reason for site in fitting if (reason := _refused(parsed, site, filename))}
            failed = failed or {site.patch.id: str(error) for site in fitting}
    left = [
        replace(site, state="unsupported", reason=failed[site.patch.id]) if site.patch.id in failed else site
        for site in sites
    ]
    return _insert(parsed, left, filename)


def _refused(parsed: Parsed, site: Site, filename: str) -> str | None:
    try:
        insert(parsed, [site], "inline", filename)
    except PatchError as error:
        return str(error)
    return None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from walking a worker's heap again and again while syntax trees come and go."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
