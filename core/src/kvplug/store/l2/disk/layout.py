"""Where things are in the directory of a disk tier, and what they take.

<disk_path>/kvplug-disk-1/        1 is the version of all of this
    ledger                        bytes and values of each shard
    temporary/<charge>-<random>   what is being written, with the bytes that are set aside for it
    values-<shards>/<shard>/      values; how many shards there are is in the name
        <key in hexadecimal>
"""

# Paths are plain strings, and listings tuples: looks into a directory of a million files shouldn't cost objects.
# ruff: noqa: PTH103, PTH116, PTH118, PTH208

from __future__ import annotations

import os
import re
import stat
import zlib
from typing import NamedTuple

__all__ = ["MAX_SHARDS", "Layout", "Value", "charge", "charge_of", "look", "overhead", "reserved", "shards_for"]

_FORMAT = "kvplug-disk-1"
_VALUES = re.compile(r"values-(\d{1,5})")
_TEMPORARY = re.compile(r"(\d{1,18})-[0-9a-f]{16}")
_KEY = re.compile(r"(?:[0-9a-f]{2}){1,64}")

#: What file systems give space in.
_PAGE = 4096
#: Bytes for a value's entry in its directory: names of up to 128 characters, in directories that may be half empty.
_ENTRY_BYTES = 512
#: Bytes of a shard's name in the directory that they are all in.
_SHARD_NAME_BYTES = 64

#: A shard is read as a whole to find its oldest values. So it should hold enough of them that the oldest is old.
_VALUES_PER_SHARD = 64
MAX_SHARDS = 4096


def charge(size: int, blocks: int = 0) -> int:
    """Return the bytes that a file takes: of `size` bytes, in `blocks` units of 512 bytes as `stat` has them."""
    return max(-(-size // _PAGE) * _PAGE, blocks * 512) + _ENTRY_BYTES


def reserved(size: int) -> int:
    """Return the bytes to set aside for a file of `size` bytes.

    It may take a page more than it has, for the list of its extents where the disk is in pieces.
    """
    return charge(size) + _PAGE


def overhead(shards: int, ledger_bytes: int) -> int:
    """Return the bytes that are taken when there is no value: by the directories and the ledger."""
    return (shards + 4) * _PAGE + shards * _SHARD_NAME_BYTES + charge(ledger_bytes)


def shards_for(capacity_bytes: int, value_bytes: int) -> int:
    """Return the number of shards for a capacity in values of a size: a power of two."""
    wanted = capacity_bytes // (charge(value_bytes) * _VALUES_PER_SHARD)
    return min(MAX_SHARDS, 1 << max(0, wanted.bit_length() - 1))


class Value(NamedTuple):
    """A value's file, as it was listed. Orders by use.

    Attributes:
        used_ns: When it was last used, in nanoseconds since the epoch.
        path: The file.
        charge: Bytes that it takes.
        size: Its length in bytes.

    """

    used_ns: int
    path: str
    charge: int
    size: int


def look(path: str) -> Value | None:
    """Return a value's file, or None if there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return Value(status.st_mtime_ns, path, charge(status.st_size, status.st_blocks), status.st_size)


def charge_of(path: str) -> int | None:
    """Return the bytes that a value's file takes, or None if there is none."""
    value = look(path)
    return None if value is None else value.charge


class Layout:
    """Paths below a directory, for a number of shards.

    Args:
        root: The setting `disk_path`.
        shards: Number of shards.

    """

    def __init__(self, root: str, shards: int = 1) -> None:
        self.root = root
        self.base = os.path.join(root, _FORMAT)
        self.ledger = os.path.join(self.base, "ledger")
        self.temporary = os.path.join(self.base, "temporary")
        self.shards = shards
        self._values = os.path.join(self.base, f"values-{shards}")

    def find_shards(self) -> int | None:
        """Return the number of shards that the directory was made with, or None if it has none yet."""
        found = [int(match[1]) for name in os.listdir(self.base) if (match := _VALUES.fullmatch(name))]
        return max((number for number in found if 1 <= number <= MAX_SHARDS), default=None)

    def make(self) -> None:
        """Make the directories that every other one is in. Values are for their owner only: they tell of prompts."""
        for path in (self.temporary, self._values):
            os.makedirs(path, mode=0o700, exist_ok=True)

    def shard_of(self, key: bytes) -> int:
        """Return the number of the shard that a key belongs to."""
        return zlib.crc32(key) % self.shards

    def shard(self, number: int) -> str:
        """Return a shard's directory."""
        return f"{self._values}/{number:03x}"

    def value(self, key: bytes) -> str:
        """Return a value's file."""
        return f"{self._values}/{zlib.crc32(key) % self.shards:03x}/{key.hex()}"

    def list_values(self, shard: int) -> tuple[list[Value], int] | None:
        """List a shard's values, and the bytes that they take; None if it has no directory.

        Whatever else is in the directory isn't the tier's, and isn't counted.
        """
        values = []
        path = self.shard(shard)
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if not _KEY.fullmatch(entry.name):
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # deleted from outside
                        continue
                    if stat.S_ISREG(status.st_mode):
                        taken = charge(status.st_size, status.st_blocks)
                        values.append(Value(status.st_mtime_ns, entry.path, taken, status.st_size))
            directory = os.stat(path).st_blocks * 512
        except FileNotFoundError:
            return None
        # What a directory has grown by is in the charge of its entries, but it doesn't shrink when they go.
        spare = max(0, directory - _PAGE - len(values) * _ENTRY_BYTES)
        return values, spare + sum(value.charge for value in values)

    def new_temporary(self, nbytes: int) -> str:
        """Return a name for a temporary file that no other writer has, which says what is set aside for it."""
        return f"{self.temporary}/{nbytes}-{os.urandom(8).hex()}"

    def list_temporary(self) -> list[tuple[str, int]]:
        """List the temporary files, and what is set aside for each, in bytes."""
        try:
            names = os.listdir(self.temporary)
        except FileNotFoundError:
            return []
        matches = [match for name in names if (match := _TEMPORARY.fullmatch(name))]
        return [(f"{self.temporary}/{match[0]}", int(match[1])) for match in matches]
