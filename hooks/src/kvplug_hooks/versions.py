"""Which vLLM releases a patch is known for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["is_too_old", "public_version"]


def public_version(text: str) -> Version | None:
    """Return a version without its local part, such as `+cpu`, which says how vLLM was built; None if it isn't one."""
    try:
        return Version(Version(text).public)
    except InvalidVersion:
        return None


def is_too_old(version: Version | None, patch: Patch) -> bool:
    """Return whether a vLLM is older than the first release that a patch is for.

    A development version doesn't tell: a checkout without tags calls itself 0.1.dev, however new it is.
    """
    return version is not None and not version.is_devrelease and version < Version(patch.known_releases[0])
