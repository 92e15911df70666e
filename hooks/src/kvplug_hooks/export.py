"""Makes the diffs that `kvplug-hooks export` prints."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from kvplug_hooks import diff, releases
from kvplug_hooks.edit import insert
from kvplug_hooks.errors import PatchError
from kvplug_hooks.installed import Tree, installed
from kvplug_hooks.judge import judge
from kvplug_hooks.patch import path_of
from kvplug_hooks.plan import Planned, plan
from kvplug_hooks.releases import Recorded
from kvplug_hooks.versions import is_too_old

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvplug_hooks.patch import Patch

__all__ = ["Export", "export", "record_of"]


@dataclass(frozen=True)
class Export:
    """A diff and what it is based on."""

    text: str
    #: For example `vLLM 0.32.0 as installed`.
    basis: str
    added_lines: int
    #: Patches that were asked for, and that the release has no use for.
    left_out: tuple[Patch, ...]


def export(patches: Sequence[Patch], version: Version | None, source: Path | None) -> Export:
    """Return the diff of `patches` against a vLLM.

    Args:
        patches: Those that are asked for. Those that the release has no use for are left out, unless that's all.
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
    # Files that were patched are no longer what the release contains.
    if current is not None and current.version == version and not _is_patched(patches, current):
        return _from_tree(patches, current, f"vLLM {version} as installed")
    return _from_record(patches, version)


def record_of(tree: Tree, patches: Sequence[Patch]) -> dict[str, Recorded]:
    """Return what each of `patches`, on its own, comes to in the files of `tree`, for the record of releases."""
    entries = [entry for patch in patches for entry in plan(tree, [patch])]
    return {
        entry.patch.id: Recorded(
            entry.state,
            path_of(entry.module),
            "" if entry.state == "fits" else entry.reason,
            _hunks(tree, [entry]) if entry.state == "fits" else (),
        )
        for entry in entries
    }


def _is_patched(patches: Sequence[Patch], tree: Tree) -> bool:
    return any(entry.state == "already in source" for entry in plan(tree, patches))


def _from_tree(patches: Sequence[Patch], tree: Tree, basis: str) -> Export:
    together: dict[str, list[Planned]] = defaultdict(list)
    left_out = []
    for entry in plan(tree, patches):
        if entry.state == "fits":
            together[path_of(entry.module)].append(entry)
        elif entry.state == "not needed" or is_too_old(tree.version, entry.patch):
            left_out.append((entry.patch, entry.reason))
        elif entry.state == "already in source":
            raise PatchError(
                f"{tree.folder / path_of(entry.module)} contains the patch {entry.patch.id} already; "
                "there is nothing to add."
            )
        else:
            raise PatchError(entry.reason)
    return _render([(path, _hunks(tree, entries)) for path, entries in together.items()], basis, left_out, tree.version)


def _hunks(tree: Tree, planned: Sequence[Planned]) -> tuple[diff.Hunk, ...]:
    """Return the hunks of patches of one file."""
    path = path_of(planned[0].module)
    parsed, sites = judge(tree.read(path), path, [entry.patch for entry in planned])
    assert parsed is not None, "it was parsed for the plan"
    return diff.hunks(insert(parsed, sites, "lines", path))


def _from_record(patches: Sequence[Patch], version: Version) -> Export:
    record = {Version(release): entries for release, entries in releases.recorded().items()}
    if version not in record:
        below = [str(release) for release in sorted(record) if release < version][-1:]
        above = [str(release) for release in sorted(record) if release > version][:1]
        raise PatchError(
            f"vLLM {version} is neither installed here nor recorded (nearest: {' and '.join(below + above)}); "
            f"pass --source with a folder that contains its vllm package."
        )
    parts: list[tuple[str, tuple[diff.Hunk, ...]]] = []
    left_out = []
    for patch in patches:
        entry = record[version].get(patch.id)
        if entry is None or entry.path in [path for path, _ in parts]:
            raise PatchError(f"The patch {patch.id} isn't recorded for export; pass --source with a vLLM {version}.")
        if entry.state == "fits":
            parts.append((entry.path, entry.hunks))
        else:
            left_out.append((patch, entry.reason))
    return _render(parts, f"vLLM {version} as recorded", left_out, version)


def _render(
    parts: Sequence[tuple[str, tuple[diff.Hunk, ...]]],
    basis: str,
    left_out: Sequence[tuple[Patch, str]],
    version: Version | None,
) -> Export:
    if not parts and left_out:
        patch, reason = left_out[0]
        raise PatchError(f"The patch {patch.id} is for vLLM {patch.releases}, not {version}: {reason}")
    text = "".join(diff.render(path, hunks) for path, hunks in parts)
    added = sum(hunk.added for _, hunks in parts for hunk in hunks)
    return Export(text, basis, added, tuple(patch for patch, _ in left_out))
