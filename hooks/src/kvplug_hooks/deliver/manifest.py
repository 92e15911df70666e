"""What `kvplug-hooks apply` did to a vLLM, so that it can be told, checked and undone to the byte.

The manifest stands beside the package, in `.kvplug-hooks` in the folder that contains `vllm`: whoever finds the package
finds it, through whatever interpreter; it goes along when the folder is moved or copied into another image; and an
upgrade of vLLM doesn't touch it, so that it tells of a patch that an upgrade took away.

It holds no bytes of vLLM's. The original is the patched file without the added lines, and hashes vouch for both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from kvplug_hooks.deliver.states import DeliveryError, Exit
from kvplug_hooks.gone import FOLDER, MANIFEST

__all__ = [
    "FOLDER",
    "Manifest",
    "PatchedFile",
    "added_lines",
    "digest",
    "manifest_path",
    "split_lines",
    "without_lines",
]

_FORMAT = 1


@dataclass(frozen=True)
class PatchedFile:
    """One file of vLLM's that was patched."""

    #: Ids of the patches in it.
    patches: tuple[str, ...]
    #: SHA-256 of the file without and with them.
    original: str
    patched: str
    #: 1-based numbers of the lines that they added.
    added_lines: tuple[int, ...]
    #: The file's line in RECORD as the installer wrote it; None if RECORD has none.
    record_line: str | None

    def restore(self, data: bytes) -> bytes | None:
        """Return the original of a patched file's bytes, or None if they aren't those that were written."""
        if digest(data) != self.patched:
            return None
        original = without_lines(data, self.added_lines)
        return original if digest(original) == self.original else None


@dataclass(frozen=True)
class Manifest:
    """What was done to one vLLM."""

    #: Version of kvplug-hooks that did it.
    kvplug_hooks: str
    #: Version of vLLM that it was done to, and the distribution that vLLM came from.
    vllm: str
    distribution: str
    #: Ids of all patches that were asked for, those that weren't needed included.
    asked: tuple[str, ...]
    #: By path, relative to the folder that contains the package.
    files: Mapping[str, PatchedFile] = field(default_factory=dict)

    def dump(self) -> bytes:
        """Return the manifest's file."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n").encode()

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """Read the manifest of the vLLM in `folder`; None if there is none.

        Raises:
            DeliveryError: It isn't one, or is a newer kvplug-hooks' one.
            OSError: It can't be read.

        """
        path = manifest_path(folder)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return _parse(json.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeliveryError(
                f"{path} isn't a manifest that this kvplug-hooks can read ({error}); use the kvplug-hooks that wrote "
                "it, or delete it and reinstall vLLM.",
                Exit.DRIFTED,
            ) from error


def manifest_path(folder: Path) -> Path:
    """Return where the manifest of the vLLM in `folder` is."""
    return folder / FOLDER / MANIFEST


def digest(data: bytes) -> str:
    """Return the hash that the manifest uses."""
    return hashlib.sha256(data).hexdigest()


def added_lines(original: bytes, patched: bytes) -> tuple[int, ...]:
    """Return the numbers of the lines of `patched` that `original` lacks.

    Raises:
        ValueError: More than whole lines was added.

    """
    theirs, added = split_lines(original), []
    position = 0
    for number, line in enumerate(split_lines(patched), start=1):
        if position < len(theirs) and line == theirs[position]:
            position += 1
        else:
            added.append(number)
    result = tuple(added)
    if without_lines(patched, result) != original:
        raise ValueError("the patched file isn't the original and added lines")
    return result


def without_lines(data: bytes, numbers: tuple[int, ...]) -> bytes:
    """Return `data` without the lines of these 1-based numbers."""
    dropped = frozenset(numbers)
    return b"".join(line for number, line in enumerate(split_lines(data), start=1) if number not in dropped)


def split_lines(data: bytes) -> list[bytes]:
    """Return the lines with their endings. Not as `splitlines` does it, which also splits at lone carriage returns."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _parse(content: dict[str, Any]) -> Manifest:
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']}, not {_FORMAT}")
    files = {}
    for name, entry in content["files"].items():
        path = PurePosixPath(name)
        # It says which files are written to, so it must not name others than vLLM's.
        if path.parts[:1] != ("vllm",) or ".." in path.parts or path.suffix != ".py":
            raise ValueError(f"{name!r} is no module of vLLM's")
        files[str(path)] = PatchedFile(
            patches=tuple(map(str, entry["patches"])),
            original=str(entry["original"]),
            patched=str(entry["patched"]),
            added_lines=tuple(map(int, entry["added_lines"])),
            record_line=None if entry["record_line"] is None else str(entry["record_line"]),
        )
    return Manifest(
        kvplug_hooks=str(content["kvplug_hooks"]),
        vllm=str(content["vllm"]),
        distribution=str(content["distribution"]),
        asked=tuple(map(str, content["asked"])),
        files=files,
    )
