"""Which model architectures a patch concerns, beyond those that its declaration names."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["GROUP", "concerned_architectures", "is_concerned"]

#: Entry-point group in which a package says that a patch concerns its model: the name is the architecture, as vLLM
#: resolves it, the value the patch's id.
GROUP = "kvplug.architectures"


def concerned_architectures(patch: Patch) -> frozenset[str] | None:
    """Return the architectures that a patch concerns, the declared ones and those of installed packages; None: all."""
    return None if patch.architectures is None else patch.architectures | _declared(patch.id)


def is_concerned(patch: Patch, architectures: Collection[str]) -> bool:
    """Return whether a patch concerns a model that vLLM resolves to one of `architectures`."""
    concerned = concerned_architectures(patch)
    return concerned is None or not concerned.isdisjoint(architectures)


def _declared(patch_id: str) -> frozenset[str]:
    import importlib_metadata

    try:
        points = importlib_metadata.entry_points(group=GROUP)
    except Exception as error:  # noqa: BLE001 - of whatever is installed; vLLM may be in the middle of its start
        from kvplug.log import get_logger

        get_logger(__name__).warning("Entry points of %s can't be read (%r); `kvplug list` says more.", GROUP, error)
        return frozenset()
    return frozenset(point.name for point in points if point.value == patch_id)
