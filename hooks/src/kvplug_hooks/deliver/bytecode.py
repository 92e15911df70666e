"""Compiled modules beside a source file, of every interpreter and optimisation level."""

from __future__ import annotations

import _imp
import glob
from collections.abc import Iterator
from pathlib import Path

from kvplug_hooks.deliver.atomic import remove

__all__ = ["compiled", "drop", "stale"]

_FOLDER = "__pycache__"
# PEP 552: the magic number, then flags; with the flag set, the hash of the source follows.
_FLAGS = slice(4, 8)
_SOURCE_HASH = slice(8, 16)
_BY_HASH = 0b01


def compiled(source: Path, prefix: str | None) -> list[Path]:
    """Return the bytecode files of a module.

    Args:
        source: The module's file.
        prefix: The interpreter's `sys.pycache_prefix`.

    """
    folders = [source.parent / _FOLDER]
    if prefix is not None:
        folders.append(Path(prefix, *source.absolute().parent.parts[1:]))
    return sorted(found for folder in folders for found in folder.glob(f"{glob.escape(source.stem)}.*.pyc"))


def drop(source: Path, prefix: str | None) -> None:
    """Remove all of a module's bytecode."""
    for path in compiled(source, prefix):
        remove(path)


def stale(source: Path, data: bytes, prefix: str | None) -> Iterator[Path]:
    """Yield bytecode that was made from other bytes, and that Python may load nevertheless.

    That is only bytecode that is told from stale one by a hash, which some image builders make so that it is never
    checked. The usual kind has the source's size and time, which Python compares.
    """
    for path in compiled(source, prefix):
        try:
            header = path.read_bytes()[: _SOURCE_HASH.stop]
        except FileNotFoundError:
            continue
        magic = int.from_bytes(header[: _FLAGS.start], "little")
        by_hash = int.from_bytes(header[_FLAGS], "little") & _BY_HASH
        if by_hash and header[_SOURCE_HASH] != _imp.source_hash(magic, data):
            yield path
