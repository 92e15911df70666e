"""A store over a tier, driven at random and compared with what it may know: for tests of tiers and policies.

    check_store(lambda: DiskTier(settings), eviction="s3fifo", writes="evicted")

What a block holds follows from its key and from how often the cache was reset, so that a block from before a reset, of
another key, torn or damaged is noticed wherever it comes from. A restart goes back to the content of the first time:
the process has read its weights again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tiers import make_client

from kvplug.stats import Stats
from kvplug.store import Allocator, MemoryTier, Slab
from kvplug.store.l2.breaker import Breaker
from kvplug.store.l2.keys import StorageKeys
from kvplug.store.l2.tier import Tier
from kvplug.store.l2.value import HEADER_BYTES
from kvplug.store.policies import make_policy
from kvplug.store.tiered import TieredStore

_BLOCK, _SLOTS, _KEYS = 256, 8, 24
_TIMEOUT = 20.0


def _key(number: int) -> bytes:
    return bytes([number]) * 32


def _content(number: int, epoch: int) -> np.ndarray[Any, Any]:
    return ((np.arange(_BLOCK) * 7 + number * 31 + epoch * 101) & 0xFF).astype(np.uint8)


#: Runs of blocks as prompts have them: three prompts, of which more or less is asked for; now and then any run.
_prompts = st.tuples(st.sampled_from([0, 0, 0, 8, 16]), st.integers(1, 8))
_anything = st.tuples(st.integers(0, _KEYS - 1), st.integers(1, 4))
_runs = st.one_of(_prompts, _prompts, _anything).map(lambda run: range(run[0], min(run[0] + run[1], _KEYS)))
#: What ends everything that was built up happens seldom.
_seldom = st.integers(0, 7).map(lambda number: number == 7)


class StoreMachine(RuleBasedStateMachine):
    """Random operations of one worker on its store. Subclasses say of what the store is made."""

    new_tier: Callable[[], Tier]
    eviction: str
    writes: Any

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.store: TieredStore | None = None
        self.tier: Tier | None = None

    @initialize()
    def start(self) -> None:
        """Start with whatever is in the tier of an empty place."""
        self._open()

    def _open(self) -> None:
        self.stats = Stats()
        memory = MemoryTier(
            Slab(_SLOTS, _BLOCK, header_bytes=HEADER_BYTES), Allocator(_SLOTS, make_policy(self.eviction, _SLOTS))
        )
        self.names = StorageKeys("all")
        self.tier = type(self).new_tier()
        self.client = make_client(
            self.tier,
            memory.slab,
            self.stats,
            keys=self.names,
            timeout=_TIMEOUT,
            lookup_timeout=_TIMEOUT,
            breaker=Breaker(failures=10**9),
        )
        self.client.start(_TIMEOUT)
        self.store = TieredStore(
            memory,
            [self.client],
            self.stats,
            write_policy=self.writes,
            load_timeout=_TIMEOUT,
            renew=self.names.renew,
        )

    @rule(run=_runs)
    def serve(self, run: range) -> None:
        """Do what a request does: load what is there, save the rest."""
        self.load(run)
        self.save(run)

    @rule(run=_runs)
    def save(self, run: range) -> None:
        """Save blocks that were computed."""
        keys = [_key(number) for number in run]
        refs = self.store.reserve(keys)
        for number, ref in zip(run, refs, strict=True):
            if ref is not None:
                self.store.memory.slab.view(ref.slot)[:] = _content(number, self.epoch)
        self.store.publish([ref for ref in refs if ref is not None])

    @rule(run=_runs)
    def save_in_vain(self, run: range) -> None:
        """Reserve slots, write nonsense, and give them back."""
        refs = [ref for ref in self.store.reserve([_key(number) for number in run]) if ref is not None]
        for ref in refs:
            self.store.memory.slab.view(ref.slot)[:] = 0xEE
        self.store.abandon(refs)

    @rule(run=_runs)
    def load(self, run: range) -> None:
        """Load blocks: each is the one that was asked for, and the run is as long as it can be."""
        keys = [_key(number) for number in run]
        refs = self.store.pin(keys, self.store.deadline())
        try:
            for number, ref in zip(run, refs, strict=False):
                found = self.store.memory.slab.view(ref.slot)
                assert (found == _content(number, self.epoch)).all(), f"block {number} isn't what was saved"
            if len(refs) < len(run):
                here = self.store.memory.allocator.prefix_length(keys[len(refs) : len(refs) + 1])
                assert not here, "the run ended before a block that is in L1"
        finally:
            self.store.unpin(refs)

    @rule(run=_runs)
    def load_all_that_is_there(self, run: range) -> None:
        """When nothing is on its way, all leading blocks that the tier has are loaded, if L1 has room for them."""
        self._settle()
        keys = [_key(number) for number in run]
        names = [self.names(key) for key in keys]
        before = self.stats.get(f"l2_damaged:{self.tier.name}")
        known = list(self.tier.exists(names, _TIMEOUT))
        refs = self.store.pin(keys, self.store.deadline())
        self.store.unpin(refs)
        if self.stats.get(f"l2_damaged:{self.tier.name}") == before:
            leading = next((index for index, there in enumerate(known) if not there), len(known))
            assert len(refs) >= min(leading, _SLOTS)

    @rule(run=_runs)
    def announce(self, run: range) -> None:
        """Tell of a request that waits."""
        self.store.announce([_key(number) for number in run])

    @rule(run=_runs, really=_seldom)
    def lose(self, run: range, *, really: bool) -> None:
        """Somebody deletes values."""
        if not really:
            return
        self.tier.delete([self.names(_key(number)) for number in run], _TIMEOUT)

    @rule(number=st.integers(0, _KEYS - 1), position=st.integers(0, HEADER_BYTES + _BLOCK - 1))
    def damage(self, number: int, position: int) -> None:
        """A bit of a value flips."""
        name, buffer = self.names(_key(number)), memoryview(bytearray(HEADER_BYTES + _BLOCK))
        (length,) = self.tier.get([name], [buffer], _TIMEOUT)
        if length is not None:
            buffer[position] ^= 1
            self.tier.delete([name], _TIMEOUT)
            self.tier.put([name], [buffer[:length]], _TIMEOUT)

    @rule(really=_seldom)
    def reset(self, *, really: bool) -> None:
        """Weights were changed in place: nothing from before may be found."""
        if not really:
            return
        self.store.clear()
        self.epoch += 1

    @rule(really=_seldom)
    def restart(self, *, really: bool) -> None:
        """The process ends, and another one starts with the weights of the files."""
        if not really:
            return
        self.store.close()
        self.epoch = 0
        self._open()

    @rule()
    def settle(self) -> None:
        """Let everything end that is on its way."""
        self._settle()

    def _settle(self) -> None:
        assert self.client._calls.drain(time.monotonic() + _TIMEOUT)

    @invariant()
    def no_slot_is_used_twice(self) -> None:
        """There are never more slots in use than there are."""
        if self.store is not None:
            assert self.store.memory.allocator.used <= _SLOTS

    def teardown(self) -> None:
        """Nothing is held when everything has ended."""
        if self.store is None:
            return
        self._settle()
        allocator = self.store.memory.allocator
        assert sum(allocator._pins) == 0
        assert 1 not in allocator._state
        assert not self.store._loader._coming
        self.store.close()


def check_store(
    new_tier: Callable[[], Callable[[], Tier]],
    *,
    eviction: str = "lru",
    writes: str = "all",
    examples: int = 10,
    steps: int = 50,
) -> None:
    """Drive a store at random.

    Args:
        new_tier: Returns, for each example, what makes tiers at one empty place.
        eviction: L1's eviction policy.
        writes: The write policy.
        examples: Random sequences.
        steps: Operations in each.

    """

    class Machine(StoreMachine):
        def __init__(self) -> None:
            type(self).new_tier = staticmethod(new_tier())
            super().__init__()

    Machine.eviction, Machine.writes = eviction, writes
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            # Threads make it differ from run to run which steps fail: there is nothing to shrink.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
