"""Reads what engines with other parallel sizes have stored: this rank's share of a block, out of their ranks' values.

An engine that serves the same model on more or fewer ranks has other values under other names, each with a share of
the block: some layers, some KV heads. What a rank here needs of them, it takes out and puts where it belongs in its
own share. Nothing is ever written, or removed, under these names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kvplug.log import RateLimited, get_logger
from kvplug.paged.slices import Move, move
from kvplug.store.l2.operation import Operation, Outcome
from kvplug.store.l2.peer_values import PeerValue, Scratch
from kvplug.store.l2.tier import TierError
from kvplug.store.l2.value import HEADER_BYTES

if TYPE_CHECKING:
    from kvplug.paged.shares import Part
    from kvplug.stats import Stats
    from kvplug.store.l2.client import L2Client

__all__ = ["PeerClient"]

_limited = RateLimited(get_logger(__name__))

Released = Callable[["list[bool] | None"], None]


class _Wanted(NamedTuple):
    """A value to read for one of the blocks of a call."""

    block: int
    value: PeerValue
    name: bytes
    moves: Sequence[Move]
    target: memoryview


class PeerClient:
    """Looks up and reads, in one tier, what ranks of one other engine have stored. It makes no other calls.

    The calls are made by the tier's own client, with its deadlines, on its threads and behind its breaker. As there,
    whoever calls keeps the slots until an operation is released, and only then is it known what is in them.

    Args:
        base: The tier's client.
        parts: The values that make up this rank's share of a block; none for an engine of which nothing can be read.
        stats: Counts what happens, under the tier's names. A block is one, of however many values it is made.
        namespace: The setting `l2_namespace`.
        scratch: What values are read into, one piece at least as long as each of them.

    """

    def __init__(
        self, base: L2Client, parts: Sequence[Part], stats: Stats, *, namespace: str, scratch: Scratch
    ) -> None:
        self.name = base.name
        self._base = base
        self._stats = stats
        self._scratch = scratch
        values = [PeerValue(part, namespace) for part in parts]
        num_groups = len(parts[0].moves) if parts else 0
        self._by_group = [[value for value in values if value.moves[group]] for group in range(num_groups)]
        self._left = threading.Event()

    def leave(self) -> None:
        """Find nothing from now on: equal keys may not mean equal blocks any more (`StorageKeys.renew`)."""
        self._left.set()

    def exists(
        self, keys: Sequence[bytes], *, urgent: bool = True, released: Released | None = None
    ) -> Operation[list[bool]]:
        """Look blocks up, all their values in one call.

        Args:
            keys: Block keys.
            urgent: Whether somebody waits.
            released: See `Operation`.

        Returns:
            For each key whether all is there that this rank needs.

        """
        values = [self._values(key) for key in keys]
        names = [value.blocks.name(key) for key, of_block in zip(keys, values, strict=True) for value in of_block]

        def call(timeout: float) -> list[bool]:
            there = [bool(answer) for answer in self._base.tier.exists(names, timeout)]
            self._check(there, names)
            answers = iter(there)
            # Of each block as many answers as it has values.
            found = [bool(of_block) and all(list(islice(answers, len(of_block)))) for of_block in values]
            self._count("l2_lookups", len(found))
            self._count("l2_hits", sum(found))
            return found

        return self._submit(call, len(keys), self._base.lookup_timeout, urgent, released)

    def get(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        *,
        urgent: bool = True,
        released: Released | None = None,
    ) -> Operation[list[bool]]:
        """Read blocks into slots.

        Args:
            keys: Block keys.
            slots: As many slots, which nobody else uses until the operation is released.
            urgent: Whether somebody waits.
            released: See `Operation`.

        Returns:
            For each key whether its block is in its slot now, all of it, checked. The other slots hold anything.

        """
        wanted = []
        for index, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            target = self._base.blocks.view(slot)[HEADER_BYTES:]
            for value in self._values(key):
                moves = value.moves[self._group(key)]
                wanted.append(_Wanted(index, value, value.blocks.name(key), moves, target))
        known = {one.block for one in wanted}

        def call(timeout: float) -> list[bool]:
            return self._read(wanted, [index in known for index in range(len(keys))], time.monotonic() + timeout)

        return self._submit(call, len(keys), self._base.timeout, urgent, released)

    def _submit(
        self,
        call: Callable[[float], list[bool]],
        num_keys: int,
        timeout: float,
        urgent: bool,  # noqa: FBT001
        released: Released | None,
    ) -> Operation[list[bool]]:
        nothing = [False] * num_keys
        if any(self._by_group) and not self._left.is_set():
            return self._base.submit(call, nothing, timeout, urgent=urgent, released=released)
        operation = Operation(call, otherwise=nothing, timeout=timeout, patience=timeout, urgent=urgent)
        operation.outcome = Outcome.DROPPED
        if released is not None:
            released(nothing)
        operation.end()
        return operation

    def _values(self, key: bytes) -> Sequence[PeerValue]:
        """Return the values that make up a block: where there are several groups, its key ends with its group's."""
        group = self._group(key)
        return self._by_group[group] if group < len(self._by_group) else ()

    def _group(self, key: bytes) -> int:
        return key[-1] if len(self._by_group) > 1 else 0

    # -- On the tier's threads -----------------------------------------------------------------------------------

    def _read(self, wanted: Sequence[_Wanted], there: list[bool], until: float) -> list[bool]:
        """Read values, and say which blocks are there. `there` says which of them can be there at all."""
        memory = self._scratch.take()
        longest = 0.0
        try:
            while wanted:
                began = time.monotonic()
                # More bytes may have to be read than for one's own values: that isn't the tier's fault.
                if longest and began + longest > until:
                    break
                chunk, wanted = self._split(wanted)
                self._read_some(chunk, there, memory, until - began)
                wanted = [one for one in wanted if there[one.block]]
                longest = max(longest, time.monotonic() - began)
        finally:
            # The tier has returned, so it uses the memory no more.
            self._scratch.give_back(memory)
        for one in wanted:
            there[one.block] = False
        self._count("l2_blocks_read", sum(there))
        return there

    def _split(self, wanted: Sequence[_Wanted]) -> tuple[Sequence[_Wanted], Sequence[_Wanted]]:
        """Split off what fits into a piece of memory, one value at least."""
        end = used = 0
        for one in wanted:
            used += one.value.stride
            if used > self._scratch.nbytes and end:
                break
            end += 1
        return wanted[:end], wanted[end:]

    def _read_some(self, chunk: Sequence[_Wanted], there: list[bool], memory: memoryview, timeout: float) -> None:
        """Read values into memory, and what is needed of each that is whole into its block's slot."""
        names, buffers, start = [one.name for one in chunk], [], 0
        for one in chunk:
            buffers.append(memory[start : start + one.value.bytes])
            start += one.value.stride
        lengths = list(self._base.tier.get(names, buffers, timeout))
        self._check(lengths, names)
        for one, buffer, length in zip(chunk, buffers, lengths, strict=True):
            if length is None or not self._accept(one, buffer, length):
                there[one.block] = False
            elif there[one.block]:
                move(one.moves, buffer[HEADER_BYTES:], one.target)

    def _accept(self, one: _Wanted, buffer: memoryview, length: int) -> bool:
        problem = one.value.blocks.accept(one.name, buffer, length)
        if problem is None:
            self._count("l2_read_bytes", length)
            return True
        # It stays: it is another engine's. This one stores the block under its own name when it has computed it.
        self._count("l2_damaged")
        _limited.warning(
            (self.name, problem),
            "Block %s of another engine from L2 tier %s (%s) is a miss: %s.",
            one.name.hex()[:16],
            self.name,
            self._base.tier.place,
            problem.value,
        )
        return False

    @staticmethod
    def _check(answers: Sequence[object], names: Sequence[bytes]) -> None:
        if len(answers) != len(names):
            raise TierError(f"the tier answered {len(answers)} of {len(names)} keys")

    def _count(self, name: str, amount: int = 1) -> None:
        if amount:
            self._stats.add(f"{name}:{self.name}", amount)
