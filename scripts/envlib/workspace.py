"""What the set-up reads of the workspace."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

#: Raise it when the set-up changes so that environments it made before are not right any more.
SCRIPT_VERSION = 1


class SetupError(Exception):
    """The environment can't be made; the message says why and what to do."""


@dataclass(frozen=True)
class Workspace:
    """What the workspace's ``pyproject.toml`` files say.

    Attributes:
        root: The clone.
        members: Folders of the distributions, relative to the root.
        dev: Requirements of the ``dev`` dependency group.
        fingerprint: Changes when an installed copy of the members' metadata, or of `dev`, gets out of date.
    """

    root: Path
    members: tuple[str, ...]
    dev: tuple[str, ...]
    fingerprint: str

    @classmethod
    def read(cls, root: Path) -> Workspace:
        """Read the root's file and those of the members."""
        shared = read_toml(root / "pyproject.toml")
        members = tuple(shared["tool"]["uv"]["workspace"]["members"])
        dev = tuple(shared["dependency-groups"]["dev"])
        facts: list[Any] = [SCRIPT_VERSION, dev]
        for member in members:
            own = read_toml(root / member / "pyproject.toml")
            version_file = root / member / own["tool"]["hatch"]["version"]["path"]
            version = re.search(r"^__version__ = .*$", version_file.read_text(encoding="utf-8"), re.MULTILINE)
            # Tables that end up in the installed metadata. The code itself is editable.
            facts.append([member, own["build-system"], own["project"], own["tool"]["hatch"], version and version[0]])
        return cls(root, members, dev, digest(facts))

    def packages(self) -> dict[str, Path]:
        """Return the import name of each member's package, and the file that must be imported for it."""
        found = (self.root / member / "src" for member in self.members)
        return {package.parent.name: package for source in found for package in source.glob("*/__init__.py")}


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file's content. Needs Python 3.11, as the engine does."""
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(path.read_text(encoding="utf-8"))
    raise SetupError("reading TOML needs Python 3.11")


def digest(facts: Any) -> str:
    """Return a text that is another one for other facts, which JSON can tell apart."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
