"""What `valkey_url` says. Errors never quote it: a typing error may put the password anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from kvplug.errors import ConfigError

__all__ = ["Address", "Target", "parse_url"]

_DEFAULT_PORT = 6379
#: By scheme, whether it means TLS.
_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_EXAMPLE = "write it as valkey://user:password@host:6379/0, with what is special percent-encoded"


class Address(NamedTuple):
    """Where one server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Target:
    """What to connect to, and as whom."""

    #: The server, or nodes of the cluster.
    seeds: tuple[Address, ...]
    tls: bool = False
    database: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return ",".join(map(str, self.seeds))


def parse_url(url: str) -> Target:
    """Take a URL apart.

    Raises:
        ConfigError: It is malformed.

    """
    try:
        parts = urlsplit(url)
    except ValueError:  # its message may quote the URL
        raise _error("can't be read as a URL") from None
    if parts.scheme not in _SCHEMES:
        # The scheme isn't quoted either: "secret@host" has none, and "secret:…" has the secret for one.
        raise _error(f"must begin with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
    if "@" in parts.path + parts.query + parts.fragment:
        raise _error("has a /, ? or # in its user or password")
    if parts.query or parts.fragment:
        raise _error("has a ? or a # in it, but options are settings of their own")
    login, at, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    if at and not password:
        raise _error("has a user but no password: a password alone is :password@")
    return Target(
        tuple(_address(host) for host in hosts.split(",")),
        _SCHEMES[parts.scheme],
        _database(parts.path),
        unquote(username) or None,
        unquote(password) or None,
    )


def _address(text: str) -> Address:
    host, port = text, ""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise _error("has a malformed IPv6 address")
        port = port[1:]
    elif ":" in text:
        host, _, port = text.partition(":")
    if not host:
        raise _error("names no host")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise _error("has a port that isn't a number from 1 to 65535")
    return Address(host, int(port) if port else _DEFAULT_PORT)


def _database(path: str) -> int:
    number = path.removeprefix("/")
    if number and not (number.isascii() and number.isdigit()):
        raise _error("has something else than a database's number after the host")
    return int(number or 0)


def _error(problem: str) -> ConfigError:
    return ConfigError(f"Setting valkey_url {problem}; {_EXAMPLE}.")
