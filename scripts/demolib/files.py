"""A vLLM of the demo's own, with kvplug's hook in its files."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from demolib.server import ServerError
from kvplug_hooks import apply_patches
from kvplug_hooks.deliver import Vllm
from kvplug_hooks.errors import UnsupportedError
from kvplug_hooks.patch import path_of

__all__ = ["patched_vllm"]


@contextlib.contextmanager
def patched_vllm(folder: Path) -> Iterator[Path]:
    """Have a vLLM whose files have the hook, and take it out again at the end.

    The environment's own vLLM stays as it is: this one's files are links to it, as uv makes them, and a file that is
    patched is put in a link's place.

    Args:
        folder: Where the copy goes; what is there is removed.

    Yields:
        The same folder, which belongs before the environment's own on the path.

    Raises:
        ServerError: It can't be patched, or reverting it left something behind.

    """
    try:
        _link(folder)
        with _on_the_path(folder):
            changed = _apply(folder)
        try:
            yield folder
        finally:
            with _on_the_path(folder):
                Vllm.of().revert()
        if left := [path for path in changed if not path.is_file() or b"kvplug" in path.read_bytes()]:
            raise ServerError(f"{left[0]} isn't what it was, after `kvplug-hooks revert`.")
    except UnsupportedError as error:
        raise ServerError(f"The hook can't be had in files: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _link(folder: Path) -> None:
    """Make a copy of the installed vLLM of links, in which only folders with something to patch are folders."""
    vllm = Vllm.of()
    modules = [path_of(module) for patch in vllm.registry.patches for module in patch.modules]
    metadata = [path.name for path in vllm.target.tree.folder.glob("vllm*.dist-info")]
    own = {parent.as_posix() for module in modules for parent in Path(module).parents} | set(metadata)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("vllm", *metadata):
        _link_into(vllm.target.tree.folder, folder, name, own)


def _link_into(site: Path, folder: Path, name: str, own: Collection[str]) -> None:
    """Link one path into the copy, or if it is to be a folder of its own, what is in it."""
    if name not in own or not (site / name).is_dir():
        (folder / name).symlink_to(site / name)
        return
    (folder / name).mkdir()
    for entry in (site / name).iterdir():
        # Bytecode is removed, and made again, for what is patched.
        if entry.name != "__pycache__":
            _link_into(site, folder, f"{name}/{entry.name}", own)


def _apply(folder: Path) -> list[Path]:
    """Put the hook into the files of the copy, and return those that it is in."""
    if (found := Vllm.of().target.tree.folder) != folder:
        raise ServerError(f"The vLLM that would be patched is that in {found}, not the demo's copy in {folder}.")
    done = apply_patches()
    return [folder / name for name in done.changed]


@contextlib.contextmanager
def _on_the_path(folder: Path) -> Iterator[None]:
    """Let interpreters that this process starts, of which one is asked for its vLLM, find this one first."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
