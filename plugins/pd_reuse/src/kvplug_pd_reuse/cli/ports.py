"""TCP ports: those that were asked for, and free ones."""

from __future__ import annotations

import contextlib
import socket

import click

__all__ = ["LOOPBACK", "take", "within_url"]

#: Where the engines listen.
LOOPBACK = "127.0.0.1"


def take(wanted: dict[str, tuple[str, int | None]]) -> dict[str, int]:
    """Return a port for each name: the wanted one, or one that is free.

    Args:
        wanted: By the option that sets it: the host to listen on, and the port or None.

    Raises:
        click.ClickException: One that is wanted can't be had.

    """
    ports = {}
    # All are held until all are found, so that no two are the same. Wanted ones come first.
    with contextlib.ExitStack() as stack:
        for option, (host, port) in sorted(wanted.items(), key=lambda item: item[1][1] is None):
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port or 0))
                probe.listen()
            except OSError as error:
                raise click.ClickException(
                    f"Port {port} of {host} can't be used ({error.strerror}): choose another one with {option}."
                ) from None
            ports[option] = probe.getsockname()[1]
    return ports


def within_url(host: str) -> str:
    """Return a host as a URL has it that is asked from here."""
    reachable = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)  # noqa: S104 - all interfaces, as seen from here
    return f"[{reachable}]" if ":" in reachable else reachable
