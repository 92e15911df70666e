"""The tier's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from kvplug.settings import Settings

__all__ = ["ValkeySettings"]


class ValkeySettings(Settings):
    """Settings of the L2 tier `valkey`."""

    valkey_url: SecretStr = Field(
        default=SecretStr("valkey://127.0.0.1:6379"),
        examples=["valkey://:password@127.0.0.1:6379/0"],
        description="The server: `valkey://user:password@host:port/database`, or `valkeys://` for TLS; `redis://` and "
        "`rediss://` mean the same. For a cluster, one or several of its nodes: `valkey://host1:6379,host2:6379`. "
        "Percent-encode what is special in the user and the password.",
    )
    valkey_ttl: int | None = Field(
        default=None,
        ge=1,
        examples=[86400],
        description="Seconds after which the server forgets a value, counted from when it was last written. Without "
        "it the server's own eviction has to make room: set its `maxmemory` and `maxmemory-policy allkeys-lru`.",
    )
    valkey_prefix: str = Field(
        default="kvplug:",
        max_length=64,
        pattern=r"^[!-z|~]*$",
        examples=["kvplug:"],
        description="What every key begins with, for access rules (`~kvplug:*`) and for telling keys apart where "
        "others use the server too. Printable characters, no spaces or braces.",
    )
    valkey_tls_ca: Path | None = Field(
        default=None,
        examples=["/etc/ssl/valkey-ca.pem"],
        description="File with the certificates that the server's must be signed by; the system's by default.",
    )
    valkey_tls_cert: Path | None = Field(
        default=None,
        examples=["/etc/ssl/kvplug.pem"],
        description="File with this client's certificate, where the server asks for one.",
    )
    valkey_tls_key: Path | None = Field(
        default=None,
        examples=["/etc/ssl/kvplug.key"],
        description="File with the private key of `valkey_tls_cert`, if that has none in it.",
    )
