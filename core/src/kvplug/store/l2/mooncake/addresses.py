"""Hosts and ports: how they are written, whether somebody listens, and from where this machine reaches them."""

from __future__ import annotations

import socket

from kvplug.store.l2.tier import TierError, TierTimeoutError

__all__ = ["own_address", "reach", "split_address"]

_MAX_PORT = 65535


def split_address(text: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 address stands in brackets.

    Raises:
        ValueError: It is something else. The message goes on after the text's name.

    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise ValueError("should be a host and a port, as in 10.0.0.5:50051")
    return host, int(port)


def reach(address: str, what: str, timeout: float) -> None:
    """Connect to an address and hang up.

    Args:
        address: `host:port`.
        what: What listens there, for messages.
        timeout: Seconds.

    Raises:
        TierError: Nobody listens, or the host isn't known or doesn't answer.

    """
    try:
        socket.create_connection(split_address(address), timeout).close()
    except TimeoutError as error:
        raise TierTimeoutError(
            f"{what} at {address} can't be reached within {timeout:g} s: start it, or correct the address."
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise TierError(
            f"{what} at {address} can't be reached ({reason}): start it, or correct the address."
        ) from error


def own_address(peer: str) -> str:
    """Return the address of this machine from which a peer is reached. Sends nothing.

    Raises:
        TierError: The peer's host isn't known, or there is no way to it.

    """
    host, port = split_address(peer)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            own: str = probe.getsockname()[0]
    except OSError as error:
        raise TierError(f"There is no way to {peer} ({error.strerror or error}): correct the address.") from error
    return own
