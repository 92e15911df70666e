"""What the two halves tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvplug import compat
from kvplug.store.directed import Command

__all__ = ["Load", "Part", "Save", "SlabHandshake", "StepMetadata", "WorkerReport"]

if TYPE_CHECKING:
    _WorkerMetadata = object
else:
    _WorkerMetadata = compat.worker_metadata_class() or object


@dataclass(frozen=True)
class Part:
    """Blocks of one KV-cache group, and as many slots of the slabs."""

    group: int
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Blocks of one request to copy into the paged cache. Their slots are pinned until every rank has reported."""

    number: int
    request_id: str
    parts: tuple[Part, ...]
    #: Whether the request waits for the end of the load, instead of being computed in the same step.
    asynchronous: bool
    #: Whether the parts are all that must be loaded. If not, the load fails.
    complete: bool = True


@dataclass(frozen=True)
class Save:
    """Blocks, of any requests, that are full, and their KV computed, when this step ends."""

    number: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in one step."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    #: Numbers of saves whose source blocks this step may overwrite: they must have been read before.
    overwritten: tuple[int, ...] = ()
    #: What to do with L2 tiers, in order, before anything is written to the slabs.
    commands: tuple[Command, ...] = ()
    #: Resets so far.
    epoch: int = 0
    #: Whether nothing is computed in this step.
    idle: bool = False


@dataclass(frozen=True)
class SlabHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker says of its slab."""

    num_slots: int
    #: Bytes of a slot, its header included.
    value_bytes: int
    #: The settings that decide both: `ScheduledSettings.slab_sized_by`.
    sized_by: tuple[str, int, bool] = ("", 0, False)
    #: Fewer tokens than this are computed faster than loaded, as far as that was measured.
    min_reuse_tokens: int = 0


@dataclass
class WorkerReport(_WorkerMetadata):
    """What became of transfers, from the workers to the scheduler half. Of one rank, or of several."""

    #: Until the scheduler half knows it: the smallest slab of these ranks, and their largest slot.
    slab: SlabHandshake | None = None
    #: By the number of a load or save that has ended: how many ranks say so, and whether it failed for one of them.
    loads: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    saves: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    #: By the number of a command, of how many ranks it is the answer, and what is there for all of these.
    answers: Mapping[int, tuple[int, tuple[bool, ...]]] = field(default_factory=dict)
    #: By rank, the L2 tiers that fail; of the ranks for which that has changed.
    down: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def aggregate(self, other: Any) -> WorkerReport:
        """Merge with another rank's, or several others'."""
        return WorkerReport(
            slab=merge_slabs(self.slab, other.slab),
            loads=_added(self.loads, other.loads),
            saves=_added(self.saves, other.saves),
            answers=_both(self.answers, other.answers),
            down={**self.down, **other.down},
        )


def merge_slabs(one: SlabHandshake | None, other: SlabHandshake | None) -> SlabHandshake | None:
    """Return what holds for the slabs of all ranks."""
    if one is None or other is None:
        return one or other
    return SlabHandshake(
        min(one.num_slots, other.num_slots),
        max(one.value_bytes, other.value_bytes),
        one.sized_by,
        max(one.min_reuse_tokens, other.min_reuse_tokens),
    )


def _added(
    one: Mapping[int, tuple[int, bool]], other: Mapping[int, tuple[int, bool]]
) -> Mapping[int, tuple[int, bool]]:
    merged = dict(one)
    for number, (ranks, failed) in other.items():
        before, any_failed = merged.get(number, (0, False))
        merged[number] = (before + ranks, any_failed or failed)
    return merged


def _both(
    one: Mapping[int, tuple[int, tuple[bool, ...]]], other: Mapping[int, tuple[int, tuple[bool, ...]]]
) -> Mapping[int, tuple[int, tuple[bool, ...]]]:
    merged = dict(one)
    for number, (ranks, there) in other.items():
        before, known = merged.get(number, (0, there))
        # One that is empty stands for a call that failed.
        both = tuple(a and b for a, b in zip(known, there, strict=True)) if len(known) == len(there) else ()
        merged[number] = (before + ranks, both)
    return merged
