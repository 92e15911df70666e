"""How kvplug's hook got into the model runner that a server uses."""

from __future__ import annotations

import re

__all__ = ["hook_delivery"]

# What kvplug logs in a worker when it registers a connector's hooks, at the first step.
_LIVE = re.compile(r"kvplug: hooks of .*Type1Connector.* are live in <class '[\w.]+'>, delivered by (import|file)\b")


def hook_delivery(log: str) -> str | None:
    """Return how the hook was delivered to a server's worker, `import` or `file`, or None if it isn't live.

    Args:
        log: What the server has printed.

    """
    found = _LIVE.search(log)
    return None if found is None else found[1]
