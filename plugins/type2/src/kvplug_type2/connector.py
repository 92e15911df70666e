"""The connector that vLLM creates by name."""

from __future__ import annotations

from kvplug.scheduled.connector import ScheduledConnector
from kvplug_type2.settings import Type2Settings

__all__ = ["Type2Connector"]


class Type2Connector(ScheduledConnector):
    """Reuses KV from host memory and from L2 tiers beyond it, decided on the scheduler.

    Hits count in vLLM's own budget, admission and metrics. Only what is pinned in host memory is promised. Transfers
    run beside compute.
    """

    Settings = Type2Settings
