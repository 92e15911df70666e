"""A worker's side of a store that is directed by the scheduler's: L2 calls for the slots of its slab."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvplug.log import RateLimited, get_logger
from kvplug.paged.background import Followers
from kvplug.store.tiered.gauges import L2Gauges
from kvplug.store.tiered.writer import Copies

if TYPE_CHECKING:
    from kvplug.paged import Transfer
    from kvplug.store.directed.commands import Command
    from kvplug.store.l2.client import L2Client
    from kvplug.store.l2.keys import StorageKeys
    from kvplug.store.l2.peers import PeerClient
    from kvplug.store.slab import Slab

__all__ = ["Executor"]

_limited = RateLimited(get_logger(__name__))


class Executor:
    """Carries commands out, and keeps the answers until they are reported.

    Args:
        clients: The tiers, in the order of the setting `l2`. The executor closes them.
        slab: This worker's memory.
        keys: What blocks are called in the tiers.
        notify: Called, on any thread, when there is an answer.
        peers: Read what engines with other parallel sizes have stored: for each kind of engine one for each tier, as
            `make_peers` returns them.

    """

    def __init__(
        self,
        clients: Sequence[L2Client],
        slab: Slab,
        keys: StorageKeys,
        notify: Callable[[], None] = lambda: None,
        *,
        peers: Sequence[PeerClient] = (),
    ) -> None:
        self._clients = list(clients)
        # What can be looked up and read, by the number that commands have: peers are neither written to nor closed.
        self._readable: list[L2Client | PeerClient] = [*clients, *peers]
        self._peers = list(peers)
        self._slab = slab
        self._keys = keys
        self._notify = notify
        self._copies = Copies(slab)
        # What waits for saves of this step to start.
        self._waiting: dict[int, list[tuple[Command, Callable[[list[bool] | None], None]]]] = {}
        self._followers = Followers()
        self._epoch = 0
        self._answers: deque[tuple[int, Sequence[bool]]] = deque()
        self._down: frozenset[str] | None = None
        self.gauges = L2Gauges(self._clients)

    def execute(self, commands: Iterable[Command], epoch: int) -> None:
        """Start what a step's metadata asks for. To be called before the step writes to any slot.

        Args:
            commands: The commands.
            epoch: Resets so far, as the scheduler's side counts them.

        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._keys.renew()
            for peer in self._peers:
                peer.leave()
        for command in commands:
            nothing = [False] * len(command.keys)
            if command.epoch != epoch:  # what it is about was forgotten since
                self._answer(command.number, nothing)
                continue
            try:
                self._start(command, partial(self._released, command.number))
            except Exception as error:  # noqa: BLE001 - a call that can't be made is a miss
                _limited.warning(command.kind, "An L2 call couldn't be made: %r", error)
                self._answer(command.number, nothing)

    def _start(self, command: Command, released: Callable[[list[bool] | None], None]) -> None:
        match command.kind:
            case "exists":
                self._readable[command.tier].exists(command.keys, urgent=command.urgent, released=released)
            case "get":
                self._readable[command.tier].get(command.keys, command.slots, urgent=command.urgent, released=released)
            case "put" if command.after is not None:
                self._waiting.setdefault(command.after, []).append((command, released))
            case "put":
                self._clients[command.tier].put(command.keys, command.slots, released=released)
            case "spill":
                client = self._clients[command.tier]
                copies = [self._copies.take(slot) for slot in command.slots]

                def written(kept: list[bool] | None) -> None:
                    for copy in copies:
                        self._copies.give_back(copy)
                    released(kept)

                client.put_values(command.keys, copies, released=written)

    def started(self, save: int, transfers: Sequence[Transfer], *, failed: bool) -> None:
        """Make the calls that wait for a save: as soon as it has ended, and none if it has failed.

        Args:
            save: Its number.
            transfers: What it consists of.
            failed: Whether it has failed already.

        """
        for command, released in self._waiting.pop(save, ()):
            if failed:
                released(None)
            else:
                self._followers.follow(transfers, partial(self._write, command, released), partial(released, None))

    def _write(self, command: Command, released: Callable[[list[bool] | None], None]) -> None:
        try:
            self._clients[command.tier].put(command.keys, command.slots, released=released)
        except Exception as error:  # noqa: BLE001 - a call that can't be made is a miss
            _limited.warning(command.kind, "An L2 call couldn't be made: %r", error)
            released(None)

    def _released(self, number: int, answer: list[bool] | None) -> None:
        self._answer(number, () if answer is None else answer)

    def _answer(self, number: int, answer: Sequence[bool]) -> None:
        self._answers.append((number, answer))
        self._notify()

    def take_answers(self) -> dict[int, tuple[int, tuple[bool, ...]]]:
        """Return the answers since the last call, each as that of one rank (see `Director.answer`).

        An answer is empty if the call wasn't made, or failed.
        """
        taken = {}
        while self._answers:
            number, answer = self._answers.popleft()
            taken[number] = (1, tuple(answer))
        return taken

    def take_down(self) -> frozenset[str] | None:
        """Return the names of the tiers that fail, if that has changed since the last call."""
        down = frozenset(client.name for client in self._clients if not client.health.works())
        if down == self._down:
            return None
        self._down = down
        return down

    def close(self) -> None:
        """Let writes that are waiting end, and close the tiers."""
        self._followers.close()
        for client in self._clients:
            client.close()
