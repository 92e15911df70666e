"""The workers' L2 tiers, as the scheduler's side sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Literal

from kvplug.store.directed.commands import Command

if TYPE_CHECKING:
    from kvplug.store.l2.tier import Tier

__all__ = ["DirectedClient", "Director", "Released"]

Released = Callable[["list[bool] | None"], None]


@dataclass
class _Pending:
    """A command that not all ranks have answered."""

    released: Released | None
    ranks_left: int
    answers: list[bool]
    failed: bool = False


@dataclass(frozen=True)
class DirectedOperation:
    """A call that the workers make, or will make."""

    number: int
    urgent: bool


class Director:
    """Numbers commands, keeps them until they are sent, and adds up the answers of all ranks.

    A block counts as there if it is there for every rank.

    Args:
        tiers: The tiers' classes, in the order in which they are asked.
        num_ranks: Ranks that answer.
        num_peers: Kinds of engines with other parallel sizes whose values are read. For each kind, `clients` has one
            more for each tier, behind all that are this engine's own, as the workers' executors have.

    """

    def __init__(self, tiers: Sequence[type[Tier]], num_ranks: int, num_peers: int = 0) -> None:
        self.clients = [DirectedClient(self, number, tier) for number, tier in enumerate([*tiers] * (1 + num_peers))]
        #: Names of tiers that some rank leaves alone because they fail.
        self.down: frozenset[str] = frozenset()
        self.epoch = 0
        self._num_ranks = num_ranks
        self._numbers = count()
        self._unsent: dict[int, Command] = {}
        self._pending: dict[int, _Pending] = {}

    @property
    def has_unsent(self) -> bool:
        """Whether there are commands that no step has taken yet."""
        return bool(self._unsent)

    @property
    def num_pending(self) -> int:
        """Commands whose answer isn't complete."""
        return len(self._pending)

    def submit(
        self,
        tier: int,
        kind: Literal["exists", "get", "put", "spill"],
        keys: Sequence[bytes],
        slots: Sequence[int],
        released: Released | None,
        *,
        urgent: bool,
        after: int | None = None,
    ) -> DirectedOperation:
        """Keep a command for the next step."""
        number = next(self._numbers)
        self._unsent[number] = Command(number, self.epoch, tier, kind, tuple(keys), tuple(slots), urgent, after)
        self._pending[number] = _Pending(released, self._num_ranks, [True] * len(keys))
        return DirectedOperation(number, urgent)

    def take(self) -> tuple[Command, ...]:
        """Return the commands that the next step's metadata has to carry, once."""
        if not self._unsent:
            return ()
        commands = tuple(self._unsent.values())
        self._unsent.clear()
        return commands

    def answer(self, answers: Mapping[int, tuple[int, Sequence[bool]]]) -> None:
        """Take in what ranks report.

        Args:
            answers: By command, of how many ranks it is the answer, and for each key whether it is there for all of
                these; none if a call failed, or wasn't made. Answers to commands that aren't known, or were answered
                by all before, are ignored.

        """
        for number, (ranks, there) in answers.items():
            pending = self._pending.get(number)
            if pending is None:
                continue
            pending.ranks_left -= ranks
            if len(there) == len(pending.answers):
                pending.answers = [one and other for one, other in zip(pending.answers, there, strict=True)]
            else:
                pending.failed = True
            if pending.ranks_left <= 0:
                del self._pending[number]
                if pending.released is not None:
                    pending.released(None if pending.failed else pending.answers)

    def cancel(self, operations: Collection[DirectedOperation]) -> None:
        """Drop commands that haven't been sent."""
        for operation in operations:
            if self._unsent.pop(operation.number, None) is not None:
                pending = self._pending.pop(operation.number)
                if pending.released is not None:
                    pending.released(None)

    def hasten(self, operation: DirectedOperation) -> None:
        """Let a command that hasn't been sent go first."""
        if (command := self._unsent.get(operation.number)) is not None:
            self._unsent[operation.number] = replace(command, urgent=True)


class _DirectedHealth:
    """Says whether calls may be made, as `kvplug.store.l2.health.Health` does in a worker."""

    def __init__(self, director: Director, name: str) -> None:
        self._director = director
        self._name = name

    def works(self) -> bool:
        return self._name not in self._director.down


class DirectedClient:
    """One tier, with the methods of `kvplug.store.l2.client.L2Client` that a store uses.

    They only note what has to be done. `released` is called when the answers of all ranks are in.
    """

    def __init__(self, director: Director, number: int, tier: type[Tier]) -> None:
        self.tier = tier
        self.name = tier.name
        self.health = _DirectedHealth(director, tier.name)
        self._director = director
        self._number = number

    def exists(
        self, keys: Sequence[bytes], *, urgent: bool = True, released: Released | None = None
    ) -> DirectedOperation:
        """Look blocks up."""
        return self._director.submit(self._number, "exists", keys, (), released, urgent=urgent)

    def get(
        self, keys: Sequence[bytes], slots: Sequence[int], *, urgent: bool = True, released: Released | None = None
    ) -> DirectedOperation:
        """Read blocks into slots."""
        return self._director.submit(self._number, "get", keys, slots, released, urgent=urgent)

    def put(
        self, keys: Sequence[bytes], slots: Sequence[int], *, released: Released | None = None, after: int | None = None
    ) -> DirectedOperation:
        """Write the blocks in slots: at once, or when a save of the same step has filled them."""
        return self._director.submit(self._number, "put", keys, slots, released, urgent=False, after=after)

    def put_values(
        self, keys: Sequence[bytes], slots: Sequence[int], *, released: Released | None = None
    ) -> DirectedOperation:
        """Write blocks that are about to be overwritten: the workers copy them first."""
        return self._director.submit(self._number, "spill", keys, slots, released, urgent=False)

    def cancel(self, operations: Collection[DirectedOperation]) -> None:
        """Drop calls that haven't been sent to the workers."""
        self._director.cancel(operations)

    def hasten(self, operation: DirectedOperation) -> None:
        """Let a call that hasn't been sent go first."""
        self._director.hasten(operation)
