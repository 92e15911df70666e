"""A scheduler half with made-up steps, and workers that report what they are told to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from kvplug.kv_groups import KVGroup
from kvplug.scheduled.metadata import Load, Save, SlabHandshake, StepMetadata, WorkerReport
from kvplug.scheduled.scheduler import SchedulerHalf
from kvplug_type2.settings import Type2Settings
from support.made_up_steps import Request, Table, by_group, output

__all__ = ["BLOCK", "Half", "Request", "groups", "output", "scheduled_settings"]

#: Tokens per block.
BLOCK = 4

#: What `groups` makes of: kind, block size, window.
GroupOf = tuple[Literal["full", "window", "chunk", "state"], int, int]


def groups(*wanted: GroupOf | Literal["full", "state"], every_block: bool = False) -> tuple[KVGroup, ...]:
    """Make KV-cache groups, each of a kind, block size and window; or a kind alone."""
    made = []
    for index, one in enumerate(wanted or ("full",)):
        kind, size, window = (one, BLOCK, 0) if isinstance(one, str) else one
        made.append(KVGroup(index, kind, size, window, every_block and kind == "state", {f"layer.{index}": 64}))
    return tuple(made)


def scheduled_settings(*tiers: Any, **settings: Any) -> Type2Settings:
    """Make settings, with classes of L2 tiers."""
    cls = type("Type2Settings", (Type2Settings,), {"tiers": tiers, "__module__": __name__})
    made: Type2Settings = cls(**({"l1_size_per_rank": 1 << 20, "l2_load_timeout": 30.0} | settings))
    return made


class Half:
    """A scheduler half whose workers have slabs.

    Args:
        of: The KV-cache groups; one of full attention by default.
        num_slots: Slots that the workers have; 0 if they haven't told yet.
        num_ranks: Workers.
        tiers: Classes of L2 tiers.
        scheduler: Arguments of `SchedulerHalf`.
        settings: Settings of the connector.

    """

    def __init__(
        self,
        of: Sequence[KVGroup] = (),
        *,
        num_slots: int = 32,
        num_ranks: int = 1,
        tiers: Sequence[Any] = (),
        scheduler: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.num_ranks = num_ranks
        self.scheduler = SchedulerHalf(
            scheduled_settings(*tiers, **settings),
            namespace=bytes(32),
            groups=of or groups(),
            num_ranks=num_ranks,
            **({"drop_last_hit": False} | (scheduler or {})),
        )
        if num_slots:
            self.scheduler.set_slab(SlabHandshake(num_slots, 1024))

    # -- What vLLM's scheduler does --------------------------------------------------------------------------------

    def ask(self, request: Request, local: int = 0) -> tuple[int | None, bool]:
        """Look a request up."""
        return self.scheduler.match(request, local)

    def admit(self, request: Request, blocks: Table, tokens: int) -> None:
        """Give a request its blocks."""
        self.scheduler.admit(request, by_group(blocks), tokens)

    def step(self, scheduled: dict[str, int] | None = None, **fields: Any) -> StepMetadata:
        """Schedule a step; see `output`."""
        return self.scheduler.build_metadata(output(scheduled or {}, **fields))

    def start(self, request: Request, blocks: Table, *, computed: int = 0, **fields: Any) -> StepMetadata:
        """Schedule all tokens of a new request, of which some are computed, without a load."""
        number = len(request.all_token_ids) - computed
        return self.step({request.request_id: number}, new=[(request.request_id, computed, blocks)], **fields)

    def load(self, request: Request, blocks: Table, local: int = 0) -> Load:
        """Look a request up, admit it with what was promised, and return the load."""
        tokens, _ = self.ask(request, local)
        assert tokens
        self.admit(request, blocks, tokens)
        (load,) = self.step().loads
        return load

    def store(self, tokens: Iterable[int], blocks: Table = range(1, 32), name: str = "stored") -> None:
        """Store a prompt: a request computes and saves it, and finishes."""
        request = Request(name, list(tokens))
        self.ask(request)
        self.admit(request, blocks, 0)
        self.ended(saves=self.start(request, blocks).saves)
        self.scheduler.finish(request)
        self.step(finished=[name])

    # -- What workers do -------------------------------------------------------------------------------------------

    def ended(
        self,
        loads: Iterable[Load] = (),
        saves: Iterable[Save] = (),
        *,
        failed: bool = False,
        ranks: int | None = None,
        **fields: Any,
    ) -> None:
        """Report that transfers have ended, for all ranks or for some."""
        number = self.num_ranks if ranks is None else ranks
        self.scheduler.take_report(
            WorkerReport(
                loads={load.number: (number, failed) for load in loads},
                saves={save.number: (number, failed) for save in saves},
                **fields,
            )
        )

    # -- What there is ---------------------------------------------------------------------------------------------

    @property
    def pins(self) -> int:
        """Pins on slots."""
        return sum(self.scheduler.store.allocator._pins)

    @property
    def reserved(self) -> int:
        """Slots that are being written to."""
        return sum(state == 1 for state in self.scheduler.store.allocator._state)

    @property
    def used(self) -> int:
        """Slots that hold something."""
        return self.scheduler.store.allocator.used
