"""The files of one vLLM as they are: untouched, exactly as kvplug-hooks patched them, or somebody else's."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from kvplug_hooks.deliver.manifest import FOLDER, Manifest, PatchedFile, digest
from kvplug_hooks.deliver.record import Record
from kvplug_hooks.deliver.states import DeliveryError, Exit
from kvplug_hooks.deliver.target import Target

__all__ = ["File", "Files"]


@dataclass(frozen=True)
class File:
    """One module of vLLM's."""

    #: Relative to the folder that contains the package, with `/`.
    name: str
    path: Path
    data: bytes
    #: What kvplug-hooks did to it, as it says in the manifest.
    entry: PatchedFile | None
    #: The bytes without patches; None if they can't be told.
    original: bytes | None
    #: What RECORD says; None if it says nothing.
    vouched_for: bool | None

    @property
    def patched(self) -> bool:
        """Whether it is, to the byte, what kvplug-hooks wrote."""
        return self.original is not None and self.original != self.data

    @property
    def drifted(self) -> bool:
        """Whether it is neither what kvplug-hooks wrote nor what it was before, nor what the installer put there."""
        return self.original is None


@dataclass(frozen=True)
class Files:
    """What is there: the interpreter's vLLM, its RECORD, and the manifest."""

    target: Target
    manifest: Manifest | None
    record: Record | None
    #: What was read so far: each file is read once, so that all that is concluded is concluded from the same bytes.
    _read: dict[str, File | None] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, target: Target) -> Files:
        """Read the manifest and RECORD as they are now.

        Raises:
            DeliveryError: The manifest can't be understood, or the package is a link.
            OSError: Something can't be read.

        """
        record, folder = target.owner.record, target.tree.folder
        for name in ("vllm", FOLDER, *([record.parent.name] if record else [])):
            _refuse_links(folder, name)
        return cls(target, Manifest.load(folder), None if record is None else Record.read(record))

    @cached_property
    def patched(self) -> dict[str, File]:
        """The files that are just as kvplug-hooks wrote them, by name."""
        found = {name: self.file(name) for name in (self.manifest.files if self.manifest else ())}
        return {name: file for name, file in found.items() if file is not None and file.patched}

    def file(self, name: str) -> File | None:
        """Return one file of the package as it was when it was asked for first; None if there is none of this name.

        Raises:
            DeliveryError: It is in a folder that is a link.
            OSError: It can't be read.

        """
        if name not in self._read:
            self._read[name] = self._look_at(name)
        return self._read[name]

    def _look_at(self, name: str) -> File | None:
        path = self.target.tree.folder / name
        _refuse_links(self.target.tree.folder, str(PurePosixPath(name).parent))
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        entry = self.manifest.files.get(name) if self.manifest else None
        vouched_for = None if self.record is None else self.record.vouches_for(name, data)
        return File(name, path, data, entry, self._original(data, entry, vouched_for=vouched_for), vouched_for)

    def _original(self, data: bytes, entry: PatchedFile | None, *, vouched_for: bool | None) -> bytes | None:
        if entry is not None:
            restored = data if digest(data) == entry.original else entry.restore(data)
            if restored is not None:
                return restored
        if vouched_for is not None:
            return data if vouched_for else None
        # Without a RECORD, a file that isn't what it was patched from is somebody's, unless all of vLLM is another one.
        same = self.manifest is not None and self.manifest.vllm == self.target.version
        return None if entry is not None and same else data


def _refuse_links(folder: Path, name: str) -> None:
    """Refuse folders that are links: a file in one belongs to whoever else links there."""
    path = folder
    for part in PurePosixPath(name).parts:
        path /= part
        if path.is_symlink():
            raise DeliveryError(
                f"{path} is a link to {path.resolve()}, so what is written there changes every environment that links "
                "there; leave the patch to the import (the default), or install vLLM here.",
                Exit.UNSUPPORTED,
            )
