"""Settings of a connector with a tiered block store: L1, L2, and those of the tiers that `l2` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, ByteSize, Field

from kvplug.errors import ConfigError
from kvplug.settings import AibrixVariable, L1Settings, NoEquivalentError, Settings, Size
from kvplug.store.l2.codecs import CodecName
from kvplug.store.l2.registry import load_tier, tier_names
from kvplug.store.l2.tier import Tier
from kvplug.store.tiered.writer import MAX_TIERS, WritePolicy

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StoreSettings"]

_MIB = 1 << 20


def _names(value: object) -> object:
    """Take one name, several with commas between them, or a list of names."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise ValueError("should be the name of a tier, or a list of names")
    if len(set(value)) != len(value):
        raise ValueError("should name each tier once")
    if len(value) > MAX_TIERS:
        msg = f"should name at most {MAX_TIERS} tiers"
        raise ValueError(msg)
    return tuple(value)


def _ingestion(text: str) -> str:
    policies = {"ALL": "all", "HOT": "hits", "EVICTED": "evicted"}
    if text.upper() not in policies:
        raise NoEquivalentError(f"{text} isn't available here")
    return policies[text.upper()]


class StoreSettings(L1Settings):
    """Settings of the block store.

    `load` returns an object of a subclass that has the settings of the tiers that `l2` names, too: pass it to the
    tiers as it is.
    """

    #: The tiers that `l2` names, in order.
    tiers: ClassVar[tuple[type[Tier], ...]] = ()
    #: What part of L1 may be on its way to a tier, and from all of them: one over this.
    l2_share: ClassVar[int] = 4

    l2: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        default=(),
        examples=["disk"],
        description="Tiers that blocks go to beyond host memory, the one to ask first first: `disk`, `valkey`, "
        "`mooncake`, or others that are installed. Several as a list, or with commas between them.",
    )
    l2_required: bool = Field(
        default=False,
        description="Whether an L2 tier that can't be reached at start keeps the engine from starting. If not, the "
        "engine starts without it and uses it as soon as it works.",
    )
    l2_write_policy: Annotated[
        WritePolicy, AibrixVariable("AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE", _ingestion)
    ] = Field(
        default="all",
        description="Which blocks go to L2: `all` that are saved, those that had `l2_write_min_hits` `hits` in L1, or "
        "those that L1 has `evicted`.",
    )
    l2_write_min_hits: int = Field(
        default=1,
        ge=1,
        le=255,
        description="Uses in L1 after which a block goes to L2, for the policy `hits`.",
    )
    l2_write_inflight_per_rank: Size = Field(
        default=ByteSize(256 * _MIB),
        examples=["256MiB"],
        description="Bytes that may be on their way from one rank to each L2 tier; blocks beyond that aren't written. "
        "At most a quarter of L1, but for evicted blocks.",
    )
    l2_prefetch_inflight_per_rank: Size = Field(
        default=ByteSize(256 * _MIB),
        examples=["256MiB"],
        description="Bytes that may be on their way from L2 to one rank for requests that wait to be scheduled, at "
        "most a quarter of L1. 0 turns that off: type2 then brings nothing from L2.",
    )
    l2_load_timeout: float = Field(
        default=0.5,
        gt=0,
        le=60,
        examples=[0.5],
        description="Seconds that a step (type1) or a request (type2) waits for blocks from L2, and that one lookup "
        "may take.",
    )
    l2_timeout: float = Field(
        default=2.0,
        gt=0,
        le=300,
        examples=[2.0],
        description="Seconds that reading or writing one batch of blocks may take before the tier counts as failing.",
    )
    l2_codec: CodecName = Field(
        default="none",
        description="How blocks are encoded in L2: `none`, `zstd`, or `shuffle-zstd`, which puts like bytes together "
        "first.",
    )
    l2_namespace: Annotated[str, AibrixVariable("AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE")] = Field(
        default="",
        examples=["2026-11"],
        description="Engines with different namespaces don't find each other's blocks in L2.",
    )

    @classmethod
    def load(cls, extra_config: Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the settings, those of the tiers that `l2` names included; see `Settings.load`.

        Raises:
            ConfigError: As `Settings.load`, or a tier isn't there or can't be used.

        """
        if cls.tiers:
            return super().load(extra_config, environ)
        problems: list[str] = []
        tiers: list[type[Tier]] = []
        for name in cls._chosen(extra_config or {}, environ):
            try:
                tiers.append(load_tier(name))
            except ConfigError as error:  # noqa: PERF203 - all problems are told at once
                problems.append(str(error))
        found: Self | None = None
        try:
            found = (
                _with(cls, tuple(tiers)).load(extra_config, environ) if tiers else super().load(extra_config, environ)
            )
        except ConfigError as error:
            problems.append(str(error))
        if problems or found is None:
            raise ConfigError("\n".join(problems))
        return found

    @classmethod
    def owner_of(cls, name: str) -> str | None:
        """Find the tier that a setting belongs to which `l2` doesn't name."""
        tier = next((tier for tier in tier_names() if name.startswith(f"{tier}_")), None)
        if tier is None or tier in (chosen.name for chosen in cls.tiers):
            return None
        return f"is for the L2 tier {tier!r}: add {tier!r} to the setting l2, or remove it."

    @classmethod
    def _chosen(cls, extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the tiers that are named; what is wrong with the setting is found when all are read."""
        value = extra_config["l2"] if "l2" in extra_config else environ.get(cls.variable("l2"))
        try:
            names = _names(value)
        except ValueError:
            return ()
        assert isinstance(names, tuple)
        return names


@cache
def _with(cls: type[StoreSettings], tiers: tuple[type[Tier], ...]) -> type[Any]:
    """Return a class that has the settings of tiers, too. The same for the same tiers: classes are never forgotten."""
    bases = [tier.Settings for tier in tiers if tier.Settings not in (None, Settings)]
    attributes: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "tiers": tiers,
        "__annotations__": {},
    }
    return type(cls.__name__, (cls, *bases), attributes)
