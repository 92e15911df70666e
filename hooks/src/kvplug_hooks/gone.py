"""Notices, as vLLM starts, that a file which `kvplug-hooks apply` patched isn't patched any more.

An upgrade or a reinstallation of vLLM takes a patch in a file away. The import delivers it then, so nothing fails; but
who counts on the file should know.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FOLDER", "MANIFEST", "file_patch_gone"]

#: The folder beside the package that holds what belongs to this distribution, and the manifest in it; see
#: `kvplug_hooks.deliver.manifest`, which is too much to import in each of vLLM's processes.
FOLDER = ".kvplug-hooks"
MANIFEST = "manifest.json"


def file_patch_gone(patch: str, module: str, file: str | None) -> str | None:
    """Return what to say about a patch that had to be delivered at import, if it was in the file before.

    Args:
        patch: The patch's id.
        module: Dotted name of the module.
        file: The module's file.

    """
    depth = module.count(".")
    if file is None or len(Path(file).parents) <= depth:
        return None
    folder = Path(file).parents[depth]
    manifest = folder / FOLDER / MANIFEST
    if not os.path.exists(manifest):  # noqa: PTH110 - which raises nothing, whatever the folder is
        return None
    import json

    try:
        content = json.loads(manifest.read_bytes())
        if patch not in content["files"][f"{module.replace('.', '/')}.py"]["patches"]:
            return None
        before = str(content["vllm"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not for this module, or unreadable, which `kvplug-hooks status` reports
    why = _what_happened(folder, before)
    return f"The patch {patch} isn't in {file} any more, where `kvplug-hooks apply` put it: {why}; run it again."


def _what_happened(folder: Path, before: str) -> str:
    from kvplug_hooks.installed import Tree

    now = Tree(folder).version
    if now is None or str(now) == before:
        return "vLLM was reinstalled, or that was interrupted"
    return f"vLLM was {before} then and is {now} now"
