"""What patching the files of a vLLM would do, and the patched texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvplug_hooks.edit import insert
from kvplug_hooks.errors import PatchError
from kvplug_hooks.judge import excluded, judge
from kvplug_hooks.patch import path_of
from kvplug_hooks.sites import Parsed, Site, State

if TYPE_CHECKING:
    from kvplug_hooks.installed import Tree
    from kvplug_hooks.patch import Patch
    from kvplug_hooks.source import SourceText

__all__ = ["Planned", "plan", "rewrite"]


@dataclass(frozen=True)
class Planned:
    """How a patch and a vLLM go together."""

    patch: Patch
    #: The module that has the function, or the one that should have it.
    module: str
    #: The module's file; None if there is none.
    path: Path | None
    state: State
    #: One sentence.
    reason: str


def plan(tree: Tree, patches: Sequence[Patch], *, architectures: Collection[str] | None = None) -> list[Planned]:
    """Say for each patch what applying it to the files in `tree` would come to. Nothing is changed.

    Args:
        tree: The vLLM.
        patches: The patches, with unique ids.
        architectures: Architectures of the model that is to be served, as vLLM resolves them. Patches that concern
            other models only are then left out. None: patches of all models are wanted.

    Returns:
        One entry per patch, in their order.

    """
    modules = {patch.id: _module(tree, patch) for patch in patches}
    together: dict[str, list[Patch]] = defaultdict(list)
    for patch in patches:
        together[modules[patch.id]].append(patch)
    sites: dict[str, Site] = {}
    for module, its_patches in together.items():
        for site in _judge(tree, module, its_patches, architectures):
            sites[site.patch.id] = site
    return [_planned(tree, modules[patch.id], sites[patch.id]) for patch in patches]


def rewrite(tree: Tree, planned: Sequence[Planned]) -> dict[Path, SourceText]:
    """Return, for each file that `planned` changes, its text with all of the patches that fit.

    The texts are made from what the files contain now. Each is its file's with two lines more per patch (patches
    that share an import have it once), and compiles.

    Args:
        tree: The vLLM that was planned for.
        planned: What `plan` returned, or a part of it. What doesn't fit is left out.

    Raises:
        PatchError: A file has changed, so that something doesn't fit any more.

    """
    together: dict[str, list[Planned]] = defaultdict(list)
    for entry in planned:
        if entry.state == "fits":
            together[entry.module].append(entry)
    texts: dict[Path, SourceText] = {}
    for module, entries in together.items():
        path = tree.folder / path_of(module)
        parsed, sites = judge(tree.read(path_of(module)), path_of(module), [entry.patch for entry in entries])
        wrong = next((site for site in sites if site.state != "fits"), None)
        if parsed is None or wrong is not None:
            raise PatchError(wrong.reason if wrong else f"{path} can't be parsed any more; try again.")
        texts[path] = insert(parsed, sites, "lines", str(path)).result
    return texts


def _module(tree: Tree, patch: Patch) -> str:
    """Return the module that has the patched function: the first that defines it, else the first that exists."""
    existing = [module for module in patch.modules if (tree.folder / path_of(module)).is_file()]
    if len(existing) > 1:
        for module in existing:
            try:
                parsed = Parsed.parse(tree.read(path_of(module)), path_of(module))
            except (PatchError, SyntaxError):
                continue
            if parsed.defines(patch):
                return module
    return existing[0] if existing else patch.module


def _judge(tree: Tree, module: str, patches: Sequence[Patch], architectures: Collection[str] | None) -> list[Site]:
    path = path_of(module)
    try:
        source = tree.read(path)
    except PatchError as error:
        return [
            excluded(patch, "", path, version=tree.version, architectures=architectures)
            or Site(patch, "unsupported", str(error))
            for patch in patches
        ]
    parsed, sites = judge(source, path, patches, version=tree.version, architectures=architectures)
    return sites if parsed is None else [_tried(parsed, site) for site in sites]


def _tried(parsed: Parsed, site: Site) -> Site:
    """Make the edit, which has checks of its own."""
    if site.state != "fits":
        return site
    try:
        insert(parsed, [site], "lines", parsed.path)
    except PatchError as error:
        return Site(site.patch, "unsupported", str(error))
    return site


def _planned(tree: Tree, module: str, site: Site) -> Planned:
    path = tree.folder / path_of(module)
    return Planned(site.patch, module, path if path.is_file() else None, site.state, site.reason)
