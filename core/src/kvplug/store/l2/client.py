"""One tier for one slab: asynchronous, with a deadline on everything, and left alone while it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvplug.log import get_logger
from kvplug.store.l2.breaker import Breaker
from kvplug.store.l2.calls import Calls, Listener
from kvplug.store.l2.exchange import Exchange
from kvplug.store.l2.health import Health, said
from kvplug.store.l2.operation import Operation, Outcome
from kvplug.store.l2.tier import Tier, TierTimeoutError, Usage
from kvplug.store.l2.value import HEADER_BYTES

if TYPE_CHECKING:
    from kvplug.stats import Stats
    from kvplug.store.l2.blocks import Blocks

__all__ = ["L2Client"]

logger = get_logger(__name__)

T = TypeVar("T")
Released = Callable[["T | None"], None]

#: Seconds that an operation that nobody waits for may wait for its turn: a backlog of writes.
_PATIENCE = 30.0
#: Seconds that `close` leaves writes that are waiting, and then calls under way.
_DRAIN_SECONDS = 5.0
_CLOSE_SECONDS = 5.0


class L2Client(Listener):
    """Runs one tier's calls for the slots of one slab.

    It works on keys and slots, and knows nothing of which slots are free: whoever calls keeps a slot pinned (for
    `put`) or reserved (for `get`) until the operation is released, which can be after it has ended. So a call that
    comes back late finds its memory as it was.

    All operations are batches and return at once; each ends by its deadline. While the breaker is open they end at
    once, as if nothing were there.

    Args:
        tier: The tier. The client closes it.
        blocks: Where blocks are in memory, and what they are called and look like in the tier.
        stats: Counts what happens, under names with the tier's at their end.
        timeout: Seconds that reading or writing one batch may take.
        lookup_timeout: Seconds that a lookup may take.
        breaker: Decides when the tier is left alone.

    """

    def __init__(
        self,
        tier: Tier,
        blocks: Blocks,
        stats: Stats,
        *,
        timeout: float = 2.0,
        lookup_timeout: float = 0.5,
        breaker: Breaker | None = None,
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.blocks = blocks
        self._exchange = Exchange(tier, blocks, stats)
        self.timeout = timeout
        self.lookup_timeout = lookup_timeout
        self._calls = Calls(f"kvplug-{tier.name}", max(1, tier.max_calls), self)
        self.health = Health(
            tier,
            max_value_bytes=HEADER_BYTES + blocks.payload_bytes,
            memory=lambda: blocks.memory,
            breaker=Breaker() if breaker is None else breaker,
            timeout=timeout,
            changed=self._calls.poke,
        )
        self._closing = False

    # -- Start and end -------------------------------------------------------------------------------------------

    def start(self, timeout: float = 10.0) -> None:
        """Open the tier, and go on trying in the background if it can't be opened now.

        Args:
            timeout: Seconds to wait for it.

        Raises:
            TierError: It isn't open yet. The message names its place. Whoever can do without goes on.

        """
        self.health.open(timeout)

    def close(self) -> None:
        """Let writes that are waiting end, stop, and close the tier. May be called again.

        Calls that don't end in time go on, on threads that nobody waits for, in memory that stays until they do.
        """
        if self._closing:
            return
        if self.health.works():
            self._calls.drain(time.monotonic() + _DRAIN_SECONDS)
        self._closing = True
        self._calls.close()
        closing = threading.Thread(target=self._close_tier, name=f"kvplug-{self.name}-close", daemon=True)
        closing.start()
        until = time.monotonic() + _CLOSE_SECONDS
        closing.join(_CLOSE_SECONDS)
        if not (self.health.join(until) and self._calls.join(until)) or closing.is_alive():
            logger.warning("kvplug: L2 tier %s (%s) still has calls that don't end.", self.name, self.tier.place)

    def _close_tier(self) -> None:
        try:
            self.tier.close()
        except Exception as error:  # noqa: BLE001 - it is going anyway
            logger.warning("kvplug: L2 tier %s couldn't be closed: %s", self.name, said(error))

    # -- Operations ----------------------------------------------------------------------------------------------

    def exists(
        self, keys: Sequence[bytes], *, urgent: bool = True, released: Released[list[bool]] | None = None
    ) -> Operation[list[bool]]:
        """Look blocks up.

        Args:
            keys: Block keys.
            urgent: Whether somebody waits.
            released: See `Operation`.

        Returns:
            For each key whether it is there.

        """
        names = [self.blocks.name(key) for key in keys]
        call = partial(self._exchange.exists, names)
        return self.submit(call, [False] * len(names), self.lookup_timeout, urgent=urgent, released=released)

    def get(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        *,
        urgent: bool = True,
        released: Released[list[bool]] | None = None,
    ) -> Operation[list[bool]]:
        """Read blocks into slots.

        Args:
            keys: Block keys.
            slots: As many slots, which nobody else uses until the operation is released.
            urgent: Whether somebody waits.
            released: See `Operation`.

        Returns:
            For each key whether its block is in its slot now, checked. The other slots hold anything.

        """
        names = [self.blocks.name(key) for key in keys]
        views = [self.blocks.view(slot) for slot in slots]
        call = partial(self._exchange.get, names, views)
        return self.submit(call, [False] * len(names), self.timeout, urgent=urgent, released=released)

    def put(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        *,
        released: Released[list[bool]] | None = None,
    ) -> Operation[list[bool]]:
        """Write the blocks in slots.

        Args:
            keys: Block keys.
            slots: As many slots, which nobody changes until the operation is released.
            released: See `Operation`.

        Returns:
            For each key whether the tier has it now.

        """
        views = [self.blocks.view(slot) for slot in slots]
        return self.put_values(keys, views, released=released)

    def put_values(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        *,
        released: Released[list[bool]] | None = None,
    ) -> Operation[list[bool]]:
        """Write blocks that are in other memory: each with as many bytes before it as a header has.

        Args:
            keys: Block keys.
            views: The memory, which nobody changes until the operation is released. Headers are written into it.
            released: See `Operation`.

        Returns:
            As `put`.

        """
        names = [self.blocks.name(key) for key in keys]
        call = partial(self._exchange.put, names, views)
        return self.submit(call, [False] * len(names), self.timeout, urgent=False, released=released)

    def delete(self, keys: Sequence[bytes]) -> Operation[None]:
        """Remove blocks."""
        names = [self.blocks.name(key) for key in keys]
        return self.submit(lambda timeout: self.tier.delete(names, timeout), None, self.timeout, urgent=False)

    def usage(self, released: Released[Usage] | None = None) -> Operation[Usage]:
        """Ask what the tier holds."""
        return self.submit(self.tier.usage, Usage(), self.lookup_timeout, urgent=False, released=released)

    def cancel(self, operations: Sequence[Operation[list[bool]]]) -> None:
        """Drop operations whose calls haven't begun."""
        self._calls.cancel(operations)

    def hasten(self, operation: Operation[list[bool]]) -> None:
        """Let an operation go first: somebody waits for it now."""
        self._calls.hasten(operation)

    def submit(
        self,
        call: Callable[[float], T],
        otherwise: T,
        timeout: float,
        *,
        urgent: bool,
        released: Released[T] | None = None,
    ) -> Operation[T]:
        """Make a call on the tier's threads, or none while the tier is left alone.

        Args:
            call: The call, which is given the seconds that it may take.
            otherwise: What it comes to if it isn't made, or fails.
            timeout: Seconds that it may take.
            urgent: Whether somebody waits.
            released: See `Operation`.

        """
        patience = timeout if urgent else _PATIENCE
        operation = Operation(
            call, otherwise=otherwise, timeout=timeout, patience=patience, urgent=urgent, released=released
        )
        if self.health.works() and not self._closing:
            self._calls.submit(operation)
            return operation
        self._exchange.count("l2_skipped")
        operation.outcome = Outcome.DROPPED
        if released is not None:
            released(None)
        operation.end()
        return operation

    # -- What becomes of calls (Listener) ------------------------------------------------------------------------

    def returned(self, error: BaseException | None, *, late: bool) -> None:
        """Tell of a call that has returned. One that was late has failed before."""
        if late or self._closing:
            return
        if error is None:
            self.health.succeeded()
        else:
            self._exchange.count("l2_timeouts" if isinstance(error, TierTimeoutError) else "l2_errors")
            self.health.failed(said(error))

    def overdue(self, operation: Operation[object]) -> None:
        """Tell of a call whose time is up."""
        self._exchange.count("l2_timeouts")
        self.health.failed(f"{self.tier.place} didn't answer in {operation.timeout:g} s")

    def dropped(self) -> None:
        """Count it: the tier is slower than what it is asked for."""
        if not self._closing:
            self._exchange.count("l2_dropped")

    def next_alarm(self) -> float | None:
        """Return when the tier is to be tried again."""
        return self.health.next_probe()

    def alarm(self) -> None:
        """Try it."""
        self.health.probe()
