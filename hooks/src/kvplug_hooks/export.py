"""Makes the diffs that `kvplug-hooks export` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from kvplug_hooks import diff, releases
from kvplug_hooks.edit import lines
from kvplug_hooks.errors import PatchError
from kvplug_hooks.installed import Tree, installed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvplug_hooks.patch import Patch

__all__ = ["Export", "export", "hunks_of", "is_too_old"]


@dataclass(frozen=True)
class Export:
    """A diff and what it is based on."""

    text: str
    #: For example `vLLM 0.32.0 as installed`.
    basis: str
    added_lines: int
    #: Patches that were asked for, and that the release is too old for.
    left_out: tuple[Patch, ...]


def export(patches: Sequence[Patch], version: Version | None, source: Path | None) -> Export:
    """Return the diff of `patches` against a vLLM.

    Args:
        patches: Those that are asked for. Those that the release is too old for are left out, unless that's all.
        version: The release; None for whatever `source` contains, or else is installed.
        source: A folder that contains the `vllm` package. Without it, the installed vLLM is read if it is the
            release that is asked for, and the recorded hunks are used otherwise.

    Raises:
        PatchError: There is no diff for this vLLM.

    """
    if source is not None:
        tree = Tree(source)
        if version is not None and tree.version is not None and tree.version != version:
            raise PatchError(f"{source} contains vLLM {tree.version}, not {version}; leave out --vllm, or correct it.")
        return _from_tree(patches, tree, f"vLLM {tree.version or version or 'of unknown version'} in {source}")
    current = installed()
    if version is None:
        if current is None:
            raise PatchError("No vLLM is installed here; name a release with --vllm, or a folder with --source.")
        return _from_tree(patches, current, f"vLLM {current.version or 'of unknown version'} as installed")
    if current is not None and current.version == version and not _has_hook(patches, current):
        return _from_tree(patches, current, f"vLLM {version} as installed")
    return _from_record(patches, version)


def hunks_of(tree: Tree, patch: Patch) -> tuple[diff.Hunk, ...]:
    """Return the hunks of one patch against the files in `tree`.

    Raises:
        PatchError: The patch has no exact place there, or is there already.

    """
    edit = lines(tree.source(patch), patch, patch.path)
    if edit is None:
        raise PatchError(f"{tree.folder / patch.path} contains the patch {patch.id} already; there is nothing to add.")
    return diff.hunks(edit)


def is_too_old(version: Version, patch: Patch) -> bool:
    """Return whether a vLLM is older than the first release that a patch is for."""
    return version < Version(patch.known_releases[0])


def _has_hook(patches: Sequence[Patch], tree: Tree) -> bool:
    """Return whether the files were patched, and so are no longer what the release contains."""
    fitting, _ = _split(patches, tree.version)
    return any(lines(tree.source(patch), patch, patch.path) is None for patch in fitting)


def _from_tree(patches: Sequence[Patch], tree: Tree, basis: str) -> Export:
    fitting, left_out = _split(patches, tree.version)
    return _render([(patch, hunks_of(tree, patch)) for patch in fitting], basis, left_out)


def _from_record(patches: Sequence[Patch], version: Version) -> Export:
    record = {Version(release): patch_hunks for release, patch_hunks in releases.recorded().items()}
    if version not in record:
        below = [str(release) for release in sorted(record) if release < version][-1:]
        above = [str(release) for release in sorted(record) if release > version][:1]
        raise PatchError(
            f"vLLM {version} is neither installed here nor recorded (nearest: {' and '.join(below + above)}); "
            f"pass --source with a folder that contains its vllm package."
        )
    fitting, left_out = _split(patches, version)
    parts = [(patch, record[version][patch.id]) for patch in fitting]
    return _render(parts, f"vLLM {version} as recorded", left_out)


def _split(patches: Sequence[Patch], version: Version | None) -> tuple[list[Patch], tuple[Patch, ...]]:
    """Separate the patches that a release is too old for."""
    if version is None:
        return list(patches), ()
    left_out = tuple(patch for patch in patches if is_too_old(version, patch))
    fitting = [patch for patch in patches if patch not in left_out]
    if not fitting:
        patch = left_out[0]
        raise PatchError(f"The patch {patch.id} is for vLLM {patch.releases}, not {version}: use one of those.")
    return fitting, left_out


def _render(parts: Sequence[tuple[Patch, tuple[diff.Hunk, ...]]], basis: str, left_out: tuple[Patch, ...]) -> Export:
    text = "".join(diff.render(patch.path, hunks) for patch, hunks in parts)
    return Export(text, basis, sum(hunk.added for _, hunks in parts for hunk in hunks), left_out)
