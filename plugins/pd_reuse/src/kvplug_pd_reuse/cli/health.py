"""What is asked of the engines and the router over HTTP."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

__all__ = ["is_well", "model_name"]

# Seconds, after which it will be asked again.
_TIMEOUT = 2.0


def is_well(url: str) -> bool:
    """Say whether a GET request is answered with 200."""
    return _get(url) is not None


def model_name(url: str) -> str | None:
    """Return the name under which a server at a URL serves its model, or None if it doesn't say."""
    try:
        return str(json.loads(_get(f"{url}/v1/models") or b"")["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return None


def _get(url: str) -> bytes | None:
    """Return the body of an answer, past any proxy that the environment names; None if it isn't well."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if answer.status == http.client.OK else None
