"""What can be said of the L2 tiers of one worker, as gauges."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplug.store.l2.tier import Usage

if TYPE_CHECKING:
    from kvplug.store.l2.client import L2Client

__all__ = ["L2Gauges"]

#: Seconds between two looks at what tiers hold.
_USAGE_SECONDS = 10.0


class L2Gauges:
    """Asks the tiers what they hold, once in a while, and whether they work.

    Args:
        clients: The tiers.

    """

    def __init__(self, clients: Sequence[L2Client]) -> None:
        self._clients = clients
        self._usage: dict[str, Usage] = {}
        self._usage_at = float("-inf")

    def __call__(self) -> dict[str, float]:
        """Return what is known now, by metric and tier."""
        now = time.monotonic()
        if self._clients and now - self._usage_at >= _USAGE_SECONDS:
            self._usage_at = now
            for client in self._clients:
                client.usage(lambda usage, name=client.name: self._usage.update({name: usage} if usage else {}))  # type: ignore[misc]
        gauges: dict[str, float] = {}
        for client in self._clients:
            gauges[f"l2_down:{client.name}"] = 0 if client.health.works() else 1
            usage = self._usage.get(client.name, Usage())
            if usage.used_bytes is not None:
                gauges[f"l2_usage_bytes:{client.name}"] = usage.used_bytes
            if usage.capacity_bytes is not None:
                gauges[f"l2_capacity_bytes:{client.name}"] = usage.capacity_bytes
        return gauges
