"""A random walk through what an engine with type2 can meet, with vLLM's real scheduler and simulated workers."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplug.paged import PagedCache
from kvplug.store.l2.tier import Tier, TierError, Usage
from kvplug.testing import Simulation, generate

__all__ = ["Faults", "MemoryTier", "Walk", "delayed_copies", "use_tier"]


class MemoryTier(Tier):
    """An L2 tier in this process that forgets, errs and dawdles at random."""

    name = "random"

    def __init__(self, values: dict[bytes, bytes], faults: Faults) -> None:
        self.values = values
        self.faults = faults

    @property
    def place(self) -> str:
        return "memory"

    def open(self, *, max_value_bytes: int, timeout: float) -> None:
        pass

    def exists(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        self.faults.in_tier()
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], timeout: float) -> list[int | None]:
        self.faults.in_tier()
        lengths: list[int | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self.values.get(key) if self.faults.lucky(0.97) else None
            if value is not None:
                buffer[: len(value)] = value
            lengths.append(None if value is None else len(value))
        return lengths

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], timeout: float) -> list[bool]:
        self.faults.in_tier()
        self.values.update((key, bytes(value)) for key, value in zip(keys, values, strict=True))
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes], timeout: float) -> None:
        for key in keys:
            self.values.pop(key, None)

    def usage(self, timeout: float) -> Usage:
        return Usage()

    def close(self) -> None:
        pass


class Faults:
    """What goes wrong, and how late things are. From any thread."""

    def __init__(
        self,
        seed: int,
        *,
        late: float = 0.3,
        copy_seconds: float = 0.003,
        tier_errors: float = 0.02,
        failing_copies: int = 0,
    ) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.late = late
        #: What a copy that is late takes.
        self.copy_seconds = copy_seconds
        self.tier_errors = tier_errors
        #: Of loads, and of saves, every so-manieth fails; 0 for none.
        self.failing_copies = failing_copies
        self.counts: Counter[str] = Counter()

    def lucky(self, probability: float) -> bool:
        with self._lock:
            return self._random.random() < probability

    def in_tier(self) -> None:
        if self.lucky(self.late):
            time.sleep(0.002)
        if self.lucky(self.tier_errors):
            self.counts["tier errors"] += 1
            raise TierError("memory: out of luck")

    def in_copy(self, name: str) -> None:
        if self.lucky(self.late):
            time.sleep(self.copy_seconds)
        with self._lock:
            self.counts[name] += 1
            if self.failing_copies and self.counts[name] % self.failing_copies == 0:
                raise MemoryError("out of luck")


def use_tier(monkeypatch: Any, values: dict[bytes, bytes], faults: Faults) -> None:
    """Let the setting `l2` find a `MemoryTier` as `random`."""
    from kvplug.store import settings

    tier = type("RandomTier", (MemoryTier,), {"__init__": lambda self, _: MemoryTier.__init__(self, values, faults)})
    monkeypatch.setattr(settings, "load_tier", lambda _: tier)


def delayed_copies(monkeypatch: Any, faults: Faults) -> None:
    """Let copies of blocks be late, and fail."""
    for name in ("gather", "scatter"):
        inner = getattr(PagedCache, name)

        def copy(self: Any, *args: Any, inner: Callable[..., Any] = inner, name: str = name, **kwargs: Any) -> Any:
            faults.in_copy(name)
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(PagedCache, name, copy)


@dataclass
class Walk:
    """Random operations on a simulation, and the checks after each step."""

    simulation: Simulation
    seed: int
    #: Longest prompt.
    longest: int = 200
    #: How often the contents of vLLM's own cache are compared, in steps.
    content_every: int = 25
    may_reset: bool = True
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        # Few stems, so that much is shared.
        self.stems = [self._tokens(self.longest) for _ in range(5)]
        self.live: list[str] = []
        self.prompts: dict[str, tuple[list[int], int, str | None]] = {}

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(250) for _ in range(count)]

    def run(self, steps: int) -> None:
        """Walk for so many steps, then let the engine drain, and check that nothing is left."""
        for step in range(steps):
            self.operate()
            self.simulation.step()
            self.simulation.check(contents=step % self.content_every == 0)
            self.check()
        self.drain()

    def operate(self) -> None:
        draw = self.random.random()
        simulation = self.simulation
        self.live = [request for request in self.live if simulation.finished[request].reason is None]
        if draw < 0.25 and len(self.live) < 12:
            self.add()
        elif draw < 0.27 and self.live:
            simulation.abort(self.random.choice(self.live))
            self.counts["aborts"] += 1
        elif draw < 0.275:
            simulation.reset_prefix_cache()
            self.counts["local resets"] += 1
        elif draw < 0.277 and self.may_reset:
            simulation.reset_prefix_cache(connector=True)
            self.counts["resets"] += 1

    def add(self) -> None:
        stem = self.random.choice(self.stems)
        # Whole stems too: prompts that are stored to the last token.
        shared = self.random.choice([self.random.randrange(self.longest), self.longest])
        prompt = stem[:shared] + self._tokens(self.random.randrange(1, 40) if shared < self.longest else 0)
        max_tokens = self.random.choice([1, 1, 2, 5, 30])
        salt = self.random.choice([None, None, None, "tenant"])
        logprobs = 0 if self.random.random() < 0.03 else None
        request = self.simulation.add_request(prompt, max_tokens, cache_salt=salt, prompt_logprobs=logprobs)
        self.live.append(request)
        self.prompts[request] = (prompt, max_tokens, salt)

    def check(self) -> None:
        """Check what must hold after each step."""
        scheduler = self.simulation.connector.scheduler
        if scheduler._slots is None:
            return
        assert scheduler.num_parked <= scheduler.settings.max_parked_requests
        allocator = scheduler.store.allocator
        waiting = sum(
            len(refs) for tracked in scheduler._tracked.values() if tracked.hit is not None for refs in tracked.hit.refs
        )
        loading = sum(len(load.refs) for load in scheduler._slots.transfers._loads.values())
        pins = sum(allocator._pins)
        # What is on its way to L2 is pinned, too.
        assert pins >= waiting + loading if scheduler.settings.tiers else pins == waiting + loading

    def drain(self) -> None:
        """Let all requests end, and see that nothing is left."""
        simulation = self.simulation
        simulation.drain(max_idle_steps=3000)
        deadline = time.monotonic() + 10
        scheduler = simulation.connector.scheduler
        while scheduler._slots is not None and (scheduler.num_transfers or scheduler.store.num_pending):
            assert time.monotonic() < deadline, "transfers that don't end"
            simulation.add_request([1])  # reports come with steps
            simulation.drain(max_idle_steps=3000)
        simulation.check()
        assert scheduler.num_tracked_requests == 0
        assert scheduler.num_parked == 0
        assert sum(scheduler.store.allocator._pins) == 0
        for request, (prompt, max_tokens, salt) in self.prompts.items():
            finished = simulation.finished[request]
            if finished.reason == "length":
                assert finished.tokens == generate(prompt, max_tokens, cache_salt=salt), request
                self.counts["finished"] += 1
                self.counts["external"] += finished.num_external_tokens > 0
