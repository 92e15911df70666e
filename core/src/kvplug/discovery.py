"""Find connectors that installed distributions declare, from their metadata alone.

A distribution declares a connector as an entry point of the group `vllm.kv_connectors`; nothing of it is imported
here. Whatever can't be used is kept with the reason, never raised: one broken package must not cost the others.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import importlib_metadata

__all__ = ["CONNECTORS", "DISABLE", "ConnectorEntry", "Discovery", "SkippedEntry", "discover"]

#: Entry-point group of KV-cache connectors: the name is what `--kv-transfer-config` says, the value
#: `package.module:Class`.
CONNECTORS = "vllm.kv_connectors"
#: Environment variable that turns connectors off: names separated by commas, or `*` for all.
DISABLE = "KVPLUG_DISABLE"

_VALUE = re.compile(r"(?P<module>\w+(\.\w+)*)\s*:\s*(?P<attr>\w+(\.\w+)*)\s*(\[.*\])?$")


@dataclass(frozen=True)
class ConnectorEntry:
    """An entry point that can be loaded, and where it comes from."""

    #: What users write in `--kv-transfer-config`.
    name: str
    #: Module that has the class.
    module: str
    #: The class's name in its module; dotted for a nested class.
    attr: str
    #: The distribution's name and version, as its metadata has them.
    distribution: str
    version: str
    #: Folder that the distribution is installed in; the source folder of an editable install.
    location: str
    editable: bool = False
    #: True for a name that isn't declared: a class can be asked for under its own name too.
    implied: bool = False

    @property
    def value(self) -> str:
        """The entry point's value, `package.module:Class`."""
        return f"{self.module}:{self.attr}"

    @property
    def source(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class SkippedEntry:
    """An entry point that isn't used, and why not."""

    #: Empty if the entry point's name couldn't be read.
    name: str
    distribution: str
    version: str
    #: One sentence, with what to do about it.
    reason: str


@dataclass(frozen=True)
class Discovery:
    """What `discover` found.

    Names in `entries` are unique, unless they needn't be; one of them may be in `skipped` too, for another claim.
    """

    entries: tuple[ConnectorEntry, ...] = ()
    skipped: tuple[SkippedEntry, ...] = ()


def discover(
    group: str = CONNECTORS,
    *,
    path: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    unique: bool = True,
) -> Discovery:
    """Read a group's entry points from the metadata of all installed distributions.

    Of a distribution that is found several times (an editable install beside stale metadata, a folder put before
    site-packages) only the metadata that Python would use counts; `.dist-info` goes before `.egg-info`, which
    builds leave behind. A name that two distributions claim for different values belongs to neither.

    In the group of connectors each class is also found under its own name, since vLLM looks classes up by that, and
    the variable `KVPLUG_DISABLE` turns names off.

    Args:
        group: The entry-point group.
        path: Folders to look in instead of `sys.path`.
        environ: Environment to take `KVPLUG_DISABLE` from.
        unique: Whether a name can have one value only. Else names mean nothing, and each value counts.

    Returns:
        The entries that can be loaded and those that are skipped. Never raises.

    """
    skipped: list[SkippedEntry] = []
    claims: dict[str, list[_Claim]] = defaultdict(list)
    for package in _packages(group, path, skipped):
        for name, value in package.entry_points:
            entry = _entry(package, name, value)
            if isinstance(entry, SkippedEntry):
                skipped.append(entry)
                continue
            claims[name if unique else f"{name} = {value}"].append(_Claim(entry, name))
            own_name = entry.attr.rpartition(".")[2]
            if group == CONNECTORS and own_name != name:
                claims[own_name].append(_Claim(replace(entry, name=own_name, implied=True), name))
    off = {name.strip() for name in environ.get(DISABLE, "").split(",")} if group == CONNECTORS else set()
    entries = []
    for name, all_claims in claims.items():
        # Turning a declared name off takes the class's own name along, if no other declared name keeps it on.
        live = [] if "*" in off or name in off else [claim for claim in all_claims if claim.declared not in off]
        if not live:
            skipped.append(_skip(all_claims[0].entry, f"{DISABLE}={environ[DISABLE]} turns it off."))
        elif len({claim.entry.value for claim in live}) == 1:
            entries.append(min((claim.entry for claim in live), key=lambda entry: entry.implied))
        else:
            skipped += _conflict([claim.entry for claim in live])
    return Discovery(tuple(entries), tuple(skipped))


@dataclass(frozen=True)
class _Package:
    """A distribution's metadata folder, as far as it could be read."""

    name: str
    version: str
    location: str
    editable: bool
    #: (name, value) of the group's entry points.
    entry_points: tuple[tuple[str, str], ...]
    #: Why these can't be used, if so.
    broken: str | None


@dataclass(frozen=True)
class _Claim:
    """An entry that wants its name, and the declared name that it comes from."""

    entry: ConnectorEntry
    declared: str


def _entry(package: _Package, name: str, value: str) -> ConnectorEntry | SkippedEntry:
    match = _VALUE.match(value)
    reason = package.broken
    if reason is None and not name:
        reason = f"The entry point for {value!r} has no name: tell its publisher."
    if reason is None and match is None:
        reason = f"Its value {value!r} isn't of the form package.module:Class: tell its publisher."
    if reason is not None or match is None:
        return SkippedEntry(name, package.name, package.version, reason or "")
    return ConnectorEntry(
        name=name,
        module=match["module"],
        attr=match["attr"],
        distribution=package.name,
        version=package.version,
        location=package.location,
        editable=package.editable,
    )


def _skip(entry: ConnectorEntry, reason: str) -> SkippedEntry:
    return SkippedEntry(entry.name, entry.distribution, entry.version, reason)


def _conflict(entries: list[ConnectorEntry]) -> list[SkippedEntry]:
    """Skip all entries that want one name for different values; each value is named once."""
    by_value = {entry.value: entry for entry in reversed(entries)}
    claimed = " and ".join(f"{entry.source} ({entry.value})" for entry in reversed(by_value.values()))
    reason = f"{claimed} claim this name, so neither gets it: uninstall one, or ask for another name of the class."
    return [_skip(entry, reason) for entry in reversed(by_value.values())]


# -- Metadata --------------------------------------------------------------------------------------------------------


def _packages(group: str, path: Sequence[str] | None, skipped: list[SkippedEntry]) -> Iterator[_Package]:
    """Yield the distributions that have entry points in a group, each once, in the order of `sys.path`."""
    found: dict[str, list[Any]] = defaultdict(list)
    context = {} if path is None else {"path": list(path)}
    try:
        for distribution in importlib_metadata.distributions(**context):
            found[_key(distribution)].append(distribution)
    except Exception as error:  # noqa: BLE001 - a finder of someone else's, on sys.meta_path
        skipped.append(SkippedEntry("", "", "", f"Looking for distributions failed: {_said(error)}."))
    for same_name in found.values():
        for distribution in _preferred(same_name):
            package = _package(distribution, group, skipped)
            if package is not None:
                yield package


def _key(distribution: Any) -> str:
    """Return what is equal for all metadata of one distribution, without reading the metadata if possible."""
    try:
        return str(distribution._normalized_name)  # noqa: SLF001 - importlib_metadata's own key, from the folder's name
    except Exception:  # noqa: BLE001 - it has no name: it stands for itself
        return str(id(distribution))


def _preferred(same_name: list[Any]) -> list[Any]:
    """Return, of a distribution's metadata folders, the one that counts.

    Two in the same folder, which an interrupted upgrade leaves behind, count both: nothing says which one is right.
    """
    if len(same_name) == 1:
        return same_name
    folders = list(dict.fromkeys(_folder(distribution) for distribution in same_name))
    ranks = [
        (not _is_readable(distribution), ".egg-info" in str(getattr(distribution, "_path", "")), folders.index(folder))
        for distribution, folder in zip(same_name, map(_folder, same_name), strict=True)
    ]
    return [distribution for distribution, rank in zip(same_name, ranks, strict=True) if rank == min(ranks)]


def _is_readable(distribution: Any) -> bool:
    try:
        return bool(distribution.metadata["Name"])
    except Exception:  # noqa: BLE001 - whatever is wrong with it
        return False


def _package(distribution: Any, group: str, skipped: list[SkippedEntry]) -> _Package | None:
    """Read what a distribution declares in a group; None if it declares nothing there."""
    broken = None
    name, version = _path_name(distribution), ""
    try:
        entry_points = tuple((point.name, point.value) for point in distribution.entry_points.select(group=group))
    except Exception as error:  # noqa: BLE001 - no parser is safe from what packages contain
        if _mentions(distribution, group):
            reason = f"Its entry_points.txt can't be read ({_said(error)}): reinstall it, or tell its publisher."
            skipped.append(SkippedEntry("", name, version, reason))
        return None
    if not entry_points:
        return None
    try:
        metadata = distribution.metadata
        name, version = str(metadata["Name"] or ""), str(metadata["Version"] or "")
        if not name or not version:
            broken = "Its metadata has no name or no version: reinstall it."
    except Exception as error:  # noqa: BLE001 - see above
        broken = f"Its metadata can't be read ({_said(error)}): reinstall it."
    source = _editable_source(distribution)
    return _Package(
        name=name or _path_name(distribution),
        version=version,
        location=source or _folder(distribution),
        editable=source is not None,
        entry_points=entry_points,
        broken=broken,
    )


def _mentions(distribution: Any, group: str) -> bool:
    """Say whether unreadable entry points may be about a group; a file that can't even be decoded may."""
    try:
        return group in (distribution.read_text("entry_points.txt") or "")
    except Exception:  # noqa: BLE001 - see above
        return True


def _path_name(distribution: Any) -> str:
    """Return the name that a metadata folder's own name tells."""
    return Path(str(getattr(distribution, "_path", ""))).stem.partition("-")[0] or "unknown"


def _folder(distribution: Any) -> str:
    try:
        return str(distribution.locate_file(""))
    except Exception:  # noqa: BLE001 - a provider need not have files
        return "unknown"


def _editable_source(distribution: Any) -> str | None:
    """Return the source folder of an editable install (PEP 610), else None."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not origin["dir_info"]["editable"]:
            return None
        return url2pathname(unquote(urlsplit(origin["url"]).path))
    except Exception:  # noqa: BLE001 - optional, and only for display
        return None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " ")
