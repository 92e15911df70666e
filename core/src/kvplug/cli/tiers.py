"""What `kvplug doctor` tells of the L2 tiers that settings name."""

from __future__ import annotations

from typing import Any

from kvplug.errors import KvplugError

__all__ = ["tiers_of"]


def tiers_of(settings: Any) -> list[dict[str, Any]]:
    """Make the L2 tiers of settings, which takes their libraries and what they must be told.

    None is opened: doctor changes nothing anywhere.

    Args:
        settings: Any connector's; only those of kvplug's block store have tiers.

    Returns:
        For each tier its `name`, its `place`, and its `error`, None if it can be used.

    """
    return [_made(tier, settings) for tier in getattr(settings, "tiers", ())]


def _made(tier: Any, settings: Any) -> dict[str, Any]:
    from kvplug.store.l2.health import said

    try:
        return {"name": tier.name, "error": None, "place": tier(settings if tier.Settings is not None else None).place}
    except Exception as error:  # noqa: BLE001 - a tier may be anybody's
        return {"name": tier.name, "error": str(error) if isinstance(error, KvplugError) else said(error)}
