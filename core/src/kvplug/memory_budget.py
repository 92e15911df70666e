"""Whether a machine has the memory that the tiers of all its ranks ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvplug.errors import ConfigError
from kvplug.log import get_logger

__all__ = ["check_memory", "machine_memory", "ranks_on_host"]

logger = get_logger(__name__)

_GIB = 1 << 30

#: What was logged: both roles of a connector, and several connectors, ask the same question.
_logged: set[str] = set()


def check_memory(
    per_rank_bytes: int,
    ranks_on_host: int,
    *,
    what: str,
    setting: str = "l1_size_per_rank",
    root: Path = Path("/"),
) -> None:
    """Log what all ranks of this machine ask for together, and refuse what it can't have.

    Args:
        per_rank_bytes: Bytes that each rank asks for.
        ranks_on_host: Ranks on this machine (`ranks_on_host`).
        what: What the memory is for, for example `L1`.
        setting: The setting that decides it.
        root: Where `/proc` and `/sys` are.

    Raises:
        ConfigError: The total is more than the machine's memory, or than the control group's limit.

    """
    total = per_rank_bytes * ranks_on_host
    available = machine_memory(root)
    line = f"{what}: {_gib(per_rank_bytes)} per rank, {_gib(total)} in total on this machine ({_ranks(ranks_on_host)})"
    if available is None:
        _log_once(f"kvplug: {line}; not checked, since the machine's memory isn't known.")
        return
    if total > available:
        # Rounded down to whole MiB, so that the number can be used as it is.
        largest = available // ranks_on_host >> 20
        raise ConfigError(
            f"{line} is more than the {_gib(available)} that this machine has, or that its control group allows; set "
            f"{setting} to {largest}MiB at most."
        )
    _log_once(f"kvplug: {line}.")


def ranks_on_host(parallel_config: Any) -> int:
    """Count the ranks of an engine on this machine, over its local data-parallel replicas.

    Data-parallel replicas of models that aren't mixtures of experts are engines of their own, which don't know of each
    other: only one of them is counted. Ray decides where ranks go; there can't be more of them here than devices.

    Args:
        parallel_config: vLLM's `ParallelConfig`.

    """
    ranks = int(parallel_config.local_world_size)
    if parallel_config.distributed_executor_backend == "ray" and (devices := _devices()) is not None:
        ranks = min(ranks, devices)
    # Zero stands for replicas that are started by somebody else.
    return ranks * max(1, int(parallel_config.data_parallel_size_local))


def machine_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that a process here can have at most, or None if that isn't known.

    That is the machine's physical memory, or the limit of the process's control group (v1 or v2) or of one above it, if
    that is smaller.

    Args:
        root: Where `/proc` and `/sys` are.

    """
    return min((*_physical_memory(root), *_control_group_limits(root)), default=None)


def _physical_memory(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemTotal":
            yield int(value.split()[0]) * 1024
            return
    if root != Path("/"):
        return
    # macOS has no /proc.
    try:
        pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return
    if pages > 0 and page_size > 0:
        yield pages * page_size


def _control_group_limits(root: Path) -> Iterator[int]:
    """Find the limits of this process's group and all above it.

    In a container, the path in `/proc` may be the host's, while the container's own group is what is mounted: then the
    path doesn't exist, and the mount's top is what counts.
    """
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            top, file = mount, "memory.max"
        elif "memory" in controllers.split(","):
            top, file = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.strip("/")
        for directory in (group, *group.parents):
            for limit in _lines(directory / file):
                if limit.isdigit():
                    yield int(limit)
            if directory == top:
                break


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _devices() -> int | None:
    """Count the accelerators of this machine. None without any: a CPU takes any number of ranks."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else int(current_platform.device_count())


def _log_once(line: str) -> None:
    if line not in _logged:
        _logged.add(line)
        logger.info("%s", line)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
