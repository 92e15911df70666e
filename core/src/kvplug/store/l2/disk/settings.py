"""Settings of the disk tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ByteSize, Field

from kvplug.settings import Settings, Size

__all__ = ["DiskSettings"]


def _absolute(path: Path) -> Path:
    """Expand `~`, and refuse what would mean another directory in each process."""
    try:
        path = path.expanduser()
    except RuntimeError:  # no home directory
        raise ValueError("should not begin with ~ where there is no home directory") from None
    if not path.is_absolute() or "\0" in str(path):
        raise ValueError("should be an absolute path")
    return path


class DiskSettings(Settings):
    """Settings of the disk tier. Engines that share a directory should have the same."""

    disk_path: Annotated[Path, AfterValidator(_absolute)] = Field(
        examples=["/var/cache/kvplug"],
        description="Directory for KV blocks, on a local file system. It is made if it isn't there. Several engines on "
        "one machine may share it.",
    )
    disk_size: Size = Field(
        default=ByteSize(32 << 30),
        gt=0,
        examples=["100GiB"],
        description="Bytes that the directory may take on the disk, all engines that share it together.",
    )
    disk_direct: bool = Field(
        default=False,
        description="Read and write past the page cache (O_DIRECT), where blocks lie on page boundaries in memory. For "
        "machines whose memory is needed for other things than caching the disk.",
    )
