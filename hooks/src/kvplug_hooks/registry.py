"""Finds patches: those of this distribution, and those that others ship as entry points.

An entry point of the group `kvplug.patches` has as its value `package.module:attribute`, a `Patch` or a sequence of
them. Its name is free. If it ends in `@` and the dotted name of the vLLM module that is patched (several with commas),
it is loaded only in processes that import that module; else in every process of vLLM's.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from kvplug_hooks import patches as _own
from kvplug_hooks.patch import Patch

if TYPE_CHECKING:
    from kvplug.discovery import ConnectorEntry

__all__ = ["GROUP", "OWN", "Entry", "Registry", "Rejected", "discover_entries", "load", "own_patches"]

#: The entry-point group in which distributions declare patches.
GROUP = "kvplug.patches"
#: What this distribution's own patches come from.
OWN = "kvplug-hooks"


@dataclass(frozen=True)
class Entry:
    """An entry point that has patches, not loaded."""

    name: str
    module: str
    attr: str
    #: The distribution and its version, for messages.
    source: str

    @property
    def targets(self) -> frozenset[str] | None:
        """The vLLM modules that its patches are for; None if its name doesn't say."""
        names = self.name.rpartition("@")[2] if "@" in self.name else ""
        return frozenset(part.strip() for part in names.split(",") if part.strip()) or None


@dataclass(frozen=True)
class Rejected:
    """A declaration that isn't used, and why not."""

    #: The patch's id, or the entry point's name if it didn't come to that.
    name: str
    source: str
    #: One sentence, with what to do about it.
    reason: str


@dataclass
class Registry:
    """The patches known so far. An id that several sources claim belongs to none, unless it is one of ours."""

    _claims: dict[str, list[tuple[Patch, str]]] = field(default_factory=dict)
    _rejected: list[Rejected] = field(default_factory=list)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Every patch that can be used; ids are unique."""
        return tuple(claims[0][0] for claims in self._claims.values() if len(claims) == 1 or claims[0][1] == OWN)

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """What isn't used, with reasons."""
        return (*self._rejected, *self._conflicts())

    def source_of(self, patch: Patch) -> str:
        """Return what a patch comes from."""
        return next(source for claimed, source in self._claims[patch.id] if claimed is patch)

    def add(self, patches: Iterable[Patch], source: str) -> None:
        """Add patches from one source, the own ones first of all."""
        for patch in patches:
            self._claims.setdefault(patch.id, []).append((patch, source))

    def reject(self, name: str, source: str, reason: str) -> None:
        """Keep why something isn't used."""
        self._rejected.append(Rejected(name, source, reason))

    def add_entry(self, entry: Entry) -> None:
        """Load an entry point and add its patches. A broken one is kept with a reason; nothing is raised."""
        try:
            self.add(_loaded(entry), entry.source)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's code; the others still count
            said = f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " ")
            reason = f"{entry.module}:{entry.attr} of {entry.source} can't be loaded ({said}): tell its publisher."
            self.reject(entry.name, entry.source, reason)

    def _conflicts(self) -> Iterator[Rejected]:
        for patch_id, claims in self._claims.items():
            if len(claims) == 1:
                continue
            own = claims[0][1] == OWN
            others = sorted(source for _, source in claims[own:])
            claimed = " and ".join([OWN, *others] if own else others)
            which = f"{OWN}'s is used" if own else "none of them is used"
            reason = f"{claimed} both declare a patch {patch_id}, so {which}: uninstall one, or have the id changed."
            yield from (Rejected(patch_id, source, reason) for _, source in claims[own:])


def own_patches() -> tuple[Patch, ...]:
    """Return the patches of this distribution: those of the modules in `kvplug_hooks.patches`."""
    names = sorted(module.name for module in pkgutil.iter_modules(_own.__path__))
    modules = [importlib.import_module(f"{_own.__name__}.{name}") for name in names]
    return tuple(patch for module in modules for patch in module.PATCHES)


def discover_entries() -> tuple[list[Entry], list[Rejected]]:
    """Read the entry points that have patches from the metadata of what is installed, without loading any."""
    from kvplug.discovery import discover

    found = discover(GROUP, unique=False)
    entries = [_entry(entry) for entry in found.entries]
    rejected = [
        Rejected(entry.name, f"{entry.distribution} {entry.version}".strip(), entry.reason) for entry in found.skipped
    ]
    return entries, rejected


def load() -> Registry:
    """Return all patches that there are, for programs that look at a vLLM; in vLLM's processes it is the finder's."""
    registry = Registry()
    registry.add(own_patches(), OWN)
    entries, rejected = discover_entries()
    for entry in rejected:
        registry.reject(entry.name, entry.source, entry.reason)
    for found in entries:
        registry.add_entry(found)
    return registry


def _entry(entry: ConnectorEntry) -> Entry:
    return Entry(entry.name, entry.module, entry.attr, entry.source)


def _loaded(entry: Entry) -> Sequence[Patch]:
    value = reduce(getattr, entry.attr.split("."), importlib.import_module(entry.module))
    patches: Sequence[object] = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not all(isinstance(patch, Patch) for patch in patches):
        kinds = ", ".join(sorted({type(patch).__name__ for patch in patches if not isinstance(patch, Patch)}))
        raise TypeError(f"it is or contains a {kinds}, not a kvplug_hooks.Patch")
    found = [patch for patch in patches if isinstance(patch, Patch)]
    targets = entry.targets
    strangers = {module for patch in found for module in patch.modules if targets is not None and module not in targets}
    if strangers:
        raise ValueError(f"it patches {', '.join(sorted(strangers))}, which the entry point's name doesn't say")
    return found
