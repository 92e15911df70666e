"""Settings of pd_reuse."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, ByteSize, Field, field_validator

from kvplug.errors import ConfigError
from kvplug.scheduled.settings import ScheduledSettings
from kvplug.settings import Size

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PDReuseSettings", "shared_memory_store"]

#: Where Linux has shared memory as files.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of one's own is made in it

_LAYOUT = re.compile(r"tp([1-9]\d{0,3})(?:pp([1-9]\d{0,3}))?")


def _layouts(value: object) -> object:
    """Take layouts as a list, or as text with commas between them, as pairs of sizes."""
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",") if item.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("should be a list of layouts")  # noqa: TRY004 - pydantic wants it
    layouts = []
    for item in value:
        match = _LAYOUT.fullmatch(item) if isinstance(item, str) else None
        if match is None:
            raise ValueError("should be layouts such as tp2 or tp2pp2")
        layouts.append((int(match[1]), int(match[2] or 1)))
    return tuple(dict.fromkeys(layouts))


def shared_memory_store() -> dict[str, Any]:
    """Return the settings of a store in this machine's shared memory, the same in all engines of one user.

    Raises:
        ConfigError: There is no shared memory that is a directory.

    """
    if not _SHARED_MEMORY.is_dir():
        raise ConfigError(
            "There is no /dev/shm here for the store that prefill and decode engines share: set l2, and the settings "
            "of the tier that it names."
        )
    quarter = shutil.disk_usage(_SHARED_MEMORY).total // 4
    return {"l2": ("disk",), "disk_path": str(_SHARED_MEMORY / f"kvplug-pd-{os.getuid()}"), "disk_size": quarter}


class PDReuseSettings(ScheduledSettings):
    """Settings of the store, and of how prefill and decode engines go together.

    Where `l2` isn't set, the store is a directory in shared memory (`shared_memory_store`).
    """

    # Prompts are handed over whole, so much is on its way at a time.
    l2_share: ClassVar[int] = 2
    _of_shared_memory: ClassVar[tuple[str, ...]] = ("l2", "disk_path", "disk_size")

    l2_write_inflight_per_rank: Size = Field(
        default=ByteSize(2 << 30),
        examples=["2GiB"],
        description="Bytes that may be on their way from one rank to each L2 tier; blocks beyond that aren't written, "
        "and decode engines compute them. At most half of L1.",
    )
    l2_prefetch_inflight_per_rank: Size = Field(
        default=ByteSize(2 << 30),
        gt=0,
        examples=["2GiB"],
        description="Bytes that may be on their way from L2 to one rank for requests that wait to be scheduled, at "
        "most half of L1.",
    )
    max_parked_requests: int = Field(
        default=64,
        ge=1,
        examples=[64],
        description="Waiting requests that are held back at the same time until their blocks have come from L2. Beyond "
        "that, requests start with what L1 has.",
    )
    handover_timeout: float = Field(
        default=2.0,
        ge=0,
        le=600,
        examples=[2.0],
        description="Seconds that a request waits for the next block that is on its way from L2, or that its prefill "
        "engine hasn't stored yet. What hasn't come by then is computed.",
    )
    min_reuse_tokens: int | None = Field(
        default=None,
        ge=1,
        examples=[64],
        description="Prompts with fewer tokens than this to load are computed. Measured at start if it isn't set.",
    )
    peer_layouts: Annotated[tuple[tuple[int, int], ...], BeforeValidator(_layouts)] = Field(
        default=(),
        examples=["tp2"],
        description="Tensor- and pipeline-parallel sizes of engines whose blocks are to be found, too, beside those of "
        "engines of one's own size: `tp4`, or `tp2pp2`. Several as a list, or with commas between them.",
    )

    @property
    def peers(self) -> tuple[tuple[int, int], ...]:
        """The setting `peer_layouts`."""
        return self.peer_layouts

    @field_validator("l2_write_policy")
    @classmethod
    def _writes_all(cls, value: str) -> str:
        if value != "all":
            raise ValueError("a prefill engine has to store everything: leave it at all")
        return value

    @classmethod
    def load(cls, extra_config: Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the settings; see `StoreSettings.load`. What isn't said of the store is that of shared memory."""
        given = dict(extra_config or {})
        defaults = {} if cls.tiers else cls._defaults(given, environ)
        settings = super().load(defaults | given, environ)
        settings._sources.update(dict.fromkeys(defaults, "default"))  # noqa: SLF001 - of the same class
        return settings

    @classmethod
    def _defaults(cls, given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
        """Return those settings of a store in shared memory that have to be taken."""
        if "l2" in given and not given["l2"]:
            raise ConfigError(
                "Prompts are handed over in an L2 tier, and the setting l2 names none: name one, or leave it out for a "
                "directory in shared memory."
            )
        known = {name for name in cls._of_shared_memory if name in given or environ.get(cls.variable(name))}
        if "l2" in known and (cls._chosen(given, environ) != ("disk",) or "disk_path" in known):
            return {}
        # In another directory there is another amount of room.
        known |= {"disk_size"} if "disk_path" in known else set()
        return {name: value for name, value in shared_memory_store().items() if name not in known}
