"""RECORD, the list by which installers know a distribution's files: which is whose, how long, with which hash.

Only the lines of files that change are touched, and in those only hash and size: the rest stays as the installer wrote
it, to the byte.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["Record"]

_PATH, _HASH, _SIZE = range(3)


@dataclass(frozen=True)
class Record:
    """A RECORD file."""

    path: Path
    data: bytes

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read it.

        Raises:
            OSError: It can't be read.

        """
        return cls(path, path.read_bytes())

    @cached_property
    def lines(self) -> list[str]:
        """The lines with their endings, which pip and uv write differently."""
        return io.StringIO(self.data.decode("utf-8", "surrogateescape"), newline="").readlines()

    def line(self, name: str) -> str | None:
        """Return the line of a file, by its path relative to the folder of the distribution; None if it has none."""
        found = self._find(name)
        return None if found is None else self.lines[found]

    def vouches_for(self, name: str, data: bytes) -> bool | None:
        """Return whether the installer put a file there with just these bytes; None if RECORD doesn't tell."""
        line = self.line(name)
        if line is None or not _fields(line)[_HASH]:
            return None
        algorithm, _, expected = _fields(line)[_HASH].partition("=")
        return algorithm in hashlib.algorithms_available and _hash(algorithm, data) == expected.rstrip("=")

    def with_file(self, name: str, data: bytes) -> Record:
        """Return the RECORD that vouches for these bytes; as it is, if it has no hash of the file."""
        line = self.line(name)
        if line is None or not _fields(line)[_HASH]:
            return self
        fields = _fields(line)
        algorithm, _, _ = fields[_HASH].partition("=")
        fields[_HASH] = f"{algorithm}={_hash(algorithm, data)}"
        if fields[_SIZE]:
            fields[_SIZE] = str(len(data))
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator=line[len(line.rstrip("\r\n")) :]).writerow(fields)
        return self.with_line(name, text.getvalue())

    def with_line(self, name: str, line: str) -> Record:
        """Return the RECORD with another line for a file that it has a line of."""
        found = self._find(name)
        if found is None:
            return self
        lines = [*self.lines[:found], line, *self.lines[found + 1 :]]
        return Record(self.path, "".join(lines).encode("utf-8", "surrogateescape"))

    def _find(self, name: str) -> int | None:
        # A file of several hundred kilobytes: only lines that can be meant are taken apart.
        for number, line in enumerate(self.lines):
            if name in line and _fields(line)[_PATH] == name:
                return number
        return None


def _fields(line: str) -> list[str]:
    fields = next(csv.reader([line]), [])
    return fields + [""] * (3 - len(fields))


def _hash(algorithm: str, data: bytes) -> str:
    digest = hashlib.new(algorithm, data, usedforsecurity=False).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
