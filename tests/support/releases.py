"""Python sources of vLLM releases, for tests that read or run them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvplug_hooks.installed import Tree

__all__ = ["cache", "source_tree"]

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))


def cache() -> Path:
    """Return the folder that has one folder for each release."""
    from matrixlib.sources import folder

    return folder()


def source_tree(release: str) -> Tree:
    """Return the Python files of a release; skip where they can't be had, and fail there in CI."""
    from matrixlib.sources import SourcesError, fetch

    try:
        return fetch(release)
    except SourcesError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
