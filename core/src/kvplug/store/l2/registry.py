"""Which L2 tiers there are: entry points of the group `kvplug.stores`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from kvplug.discovery import ConnectorEntry, Discovery, discover
from kvplug.errors import ConfigError
from kvplug.settings import Settings
from kvplug.store.l2.tier import Tier

__all__ = ["GROUP", "load_tier", "tier_names"]

#: Entry-point group: the name is what the setting `l2` says, the value `package.module:Class`.
GROUP = "kvplug.stores"


def tier_names() -> list[str]:
    """Return the names of all tiers that installed distributions declare, sorted. Nothing of them is imported."""
    return sorted(entry.name for entry in _discover().entries)


def load_tier(name: str) -> type[Tier]:
    """Return a tier's class. Importing it imports no client library; making one does.

    Args:
        name: What the setting `l2` says.

    Raises:
        ConfigError: There is no such tier, or what is declared under that name can't be used.

    """
    found = _discover()
    entry = next((entry for entry in found.entries if entry.name == name), None)
    if entry is None:
        reasons = [skipped.reason for skipped in found.skipped if skipped.name == name]
        known = sorted(each.name for each in found.entries)
        what = f" ({' '.join(reasons)})" if reasons else ""
        raise ConfigError(f"There is no L2 tier {name!r}{what}: set l2 to one of {', '.join(known) or 'none'}.")
    return _checked(entry, _imported(entry))


def _discover(path: Sequence[str] | None = None) -> Discovery:
    return discover(GROUP, path=path)


def _imported(entry: ConnectorEntry) -> object:
    try:
        found: object = importlib.import_module(entry.module)
        for attribute in entry.attr.split("."):
            found = getattr(found, attribute)
    except Exception as error:
        raise ConfigError(
            f"L2 tier {entry.name!r} of {entry.source} can't be imported ({type(error).__name__}: {error}): reinstall "
            "or update it, or take it out of l2."
        ) from error
    return found


def _checked(entry: ConnectorEntry, found: object) -> type[Tier]:
    """Return what was declared, if it is a tier that keeps to the rules."""
    if not (isinstance(found, type) and issubclass(found, Tier)):
        problem = "it is no subclass of kvplug.store.l2.Tier"
    elif getattr(found, "name", None) != entry.name:
        problem = f"its attribute `name` is {getattr(found, 'name', None)!r}"
    elif found.Settings is not None and not issubclass(found.Settings, Settings):
        problem = "its Settings are no subclass of kvplug.settings.Settings"
    elif found.Settings is not None and (
        wrong := [
            field
            for field in found.Settings.model_fields
            if field not in Settings.model_fields and not field.startswith(f"{entry.name}_")
        ]
    ):
        problem = f"its setting {wrong[0]!r} doesn't begin with {entry.name}_"
    else:
        return found
    raise ConfigError(
        f"L2 tier {entry.name!r} of {entry.source} ({entry.value}) can't be used, because {problem}: tell its "
        "publisher, or take it out of l2."
    )
