"""How full a store is, from the metrics of its master."""

from __future__ import annotations

import http.client

from kvplug.store.l2.mooncake.addresses import split_address
from kvplug.store.l2.tier import TierError, TierTimeoutError, Usage

__all__ = ["read_usage"]

_USED = "master_allocated_bytes"
_CAPACITY = "master_total_capacity_bytes"
_ENTRIES = "master_key_count"


def read_usage(address: str, timeout: float) -> Usage:
    """Ask the HTTP server of a master's metrics.

    Args:
        address: `host:port`.
        timeout: Seconds.

    Raises:
        TierError: It doesn't answer, or with something else.

    """
    host, port = split_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except TimeoutError as error:
        raise TierTimeoutError(f"Mooncake's metrics at {address} didn't come within {timeout:g} s.") from error
    except (OSError, http.client.HTTPException) as error:
        raise TierError(
            f"Mooncake's metrics at {address} can't be read ({error}): correct mooncake_metrics."
        ) from error
    finally:
        connection.close()
    figures = {}
    for line in text.splitlines():
        name, _, figure = line.partition(" ")
        if name in (_USED, _CAPACITY, _ENTRIES):
            figures[name] = int(float(figure))
    if answer.status != http.client.OK or len(figures) < len((_USED, _CAPACITY, _ENTRIES)):
        raise TierError(f"What answers at {address} isn't a master of Mooncake Store: correct mooncake_metrics.")
    return Usage(figures[_USED], figures[_CAPACITY], figures[_ENTRIES])
