"""Python sources of vLLM releases, for tests that read or run them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from matrixlib.sources import SourcesError, fetch, folder

if TYPE_CHECKING:
    from pathlib import Path

    from kvplug_hooks.installed import Tree

__all__ = ["cache", "source_tree"]


def cache() -> Path:
    """Return the folder that has one folder for each release."""
    return folder()


def source_tree(release: str) -> Tree:
    """Return the Python files of a release, downloaded once; skip where they can't be had."""
    try:
        return fetch(release)
    except SourcesError as error:
        pytest.skip(str(error))
