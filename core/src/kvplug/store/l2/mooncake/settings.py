"""Settings of the tier `mooncake`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kvplug.settings import Settings
from kvplug.store.l2.mooncake.addresses import split_address

__all__ = ["MooncakeSettings"]


def _address(text: str) -> str:
    split_address(text)
    return text


class MooncakeSettings(Settings):
    """Where the master of Mooncake Store is, and how values are kept there."""

    mooncake_master: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None,
        examples=["10.0.0.5:50051"],
        description="Host and RPC port of Mooncake's master. Needed where `l2` names `mooncake`.",
    )
    mooncake_replicas: int = Field(
        default=1,
        ge=1,
        le=16,
        examples=[2],
        description="Copies of each value, on different storage nodes. With fewer nodes there are fewer copies, and a "
        "warning.",
    )
    mooncake_protocol: Literal["tcp", "rdma"] = Field(
        default="tcp",
        description="How values travel between this engine and the storage nodes.",
    )
    mooncake_devices: str = Field(
        default="",
        examples=["mlx5_0,mlx5_1"],
        description="RDMA devices to use, separated by commas; empty for those that Mooncake finds.",
    )
    mooncake_metrics: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None,
        examples=["10.0.0.5:9003"],
        description="Host and HTTP port of the master's metrics. With it, kvplug's metrics say how full the store is.",
    )
