"""Runs in AIBrix's environment (see `benchmarks.store.aibrix`), and prints one line of JSON."""

from __future__ import annotations

import importlib
import json
import random
import sys
from statistics import median
from typing import Any

import torch
from benchmarks.common.timing import alternately

_BLOCK_TOKENS = 32
_MIB = 1 << 20
_LOOKUP_BLOCKS = 128

#: Layers of the model that makes a block of 1 and 4 MiB: 8 KV heads of 128 in bfloat16.
_LAYERS = {"1 MiB": 8, "4 MiB": 32}


class _AIBrix:
    """Its cache manager with L1 alone, as its connectors use it."""

    def __init__(self, layers: int, blocks: list[torch.Tensor]) -> None:
        manager, config, specs, hashable = (
            # By name: only this environment has them.
            importlib.import_module(f"aibrix_kvcache.{name}")
            for name in ("cache_manager", "config", "spec", "cache_hashable")
        )
        vars(manager)["TESTING_DISABLE_PIN_MEMORY"] = True
        tensor = specs.KVCacheTensorSpec(heads=list(range(8)), layers=list(range(layers)), head_size=128)
        spec = specs.KVCacheBlockSpec(_BLOCK_TOKENS, torch.bfloat16, specs.KVCacheBlockLayout.LCND, tensor)
        model = specs.ModelSpec(1 << 17, 1 << 17)
        self._manager: Any = manager.BaseKVCacheManager(config.KVCacheConfig(spec, model))
        self._view = hashable.TokenListView
        self._blocks = [block.view(torch.bfloat16).view(spec.block_shape) for block in blocks]
        self._out = [torch.empty_like(block) for block in self._blocks]

    def put(self, tokens: list[int]) -> None:
        query = self._view(tokens)
        allocated = self._manager.allocate_for(None, query)
        handle = allocated.get()
        tensors = handle.to_tensors()
        for target, block in zip(tensors, self._blocks, strict=True):
            target.copy_(block)
        status = self._manager.put(None, query, handle)
        if not status.is_ok() or status.get() != len(tokens):
            raise AssertionError(f"AIBrix put {status}")

    def get(self, tokens: list[int]) -> None:
        count, handle = self._manager.acquire(None, self._view(tokens)).get()
        if count != len(tokens):
            raise AssertionError(f"AIBrix has {count} of {len(tokens)} tokens")
        for target, block in zip(self._out, handle.to_tensors(), strict=True):
            target.copy_(block)
        handle.release()

    def look_up(self, tokens: list[int]) -> None:
        if self._manager.exists(None, self._view(tokens)).get() != len(tokens):
            raise AssertionError("AIBrix doesn't have the tokens")

    def read(self) -> list[torch.Tensor]:
        return [block.view(-1).view(torch.uint8) for block in self._out]


class _Ours:
    """The memory tier, with keys made of the tokens each time, as for a request that is new."""

    def __init__(self, blocks: list[torch.Tensor]) -> None:
        from kvplug.store import MemoryTier

        self._tier = MemoryTier.with_capacity(768 * _MIB, blocks[0].numel(), header_bytes=64)
        self._blocks = [block.numpy() for block in blocks]
        self._out = [torch.empty_like(block) for block in blocks]

    def keys(self, tokens: list[int]) -> list[bytes]:
        from kvplug.identity import RequestIdentity
        from kvplug.keys import KeyChain

        chain = KeyChain(bytes(32), _BLOCK_TOKENS, RequestIdentity())
        chain.extend(tokens)
        return list(chain.keys)

    def put(self, tokens: list[int]) -> None:
        with self._tier.writing(self.keys(tokens)) as slots:
            for slot, block in zip(slots, self._blocks, strict=True):
                assert slot is not None
                self._tier.slab.view(slot)[:] = block

    def get(self, tokens: list[int]) -> None:
        with self._tier.reading(self.keys(tokens)) as slots:
            for target, slot in zip(self._out, slots, strict=True):
                target.numpy()[:] = self._tier.slab.view(slot)

    def look_up(self, tokens: list[int], keys: list[bytes] | None = None) -> None:
        keys = keys or self.keys(tokens)
        if self._tier.allocator.prefix_length(keys) != len(keys):
            raise AssertionError("a block isn't there")

    def read(self) -> list[torch.Tensor]:
        return self._out


def main() -> None:
    """Measure, and print the results."""
    repeats = int(sys.argv[1])
    print(json.dumps({size: _measure(layers, repeats) for size, layers in _LAYERS.items()}))


def _measure(layers: int, repeats: int) -> dict[str, dict[str, Any]]:
    generator = random.Random(0)  # noqa: S311 - tokens are no secrets
    count = _LOOKUP_BLOCKS * 8 // layers  # 128 MiB
    block_bytes = 2 * layers * _BLOCK_TOKENS * 8 * 128 * 2
    blocks = [torch.randint(0, 256, (block_bytes,), dtype=torch.uint8) for _ in range(count)]
    theirs, ours = _AIBrix(layers, blocks), _Ours(blocks)

    def prompt() -> list[int]:
        return [generator.randrange(150_000) for _ in range(count * _BLOCK_TOKENS)]

    # Both are full, and their memory has been touched, before the first run.
    for tokens in [prompt() for _ in range(7)]:
        theirs.put(tokens)
        ours.put(tokens)
    prompts = [prompt() for _ in range(repeats)]
    queues = iter(prompts), iter(prompts)
    their_puts, our_puts = alternately(
        [lambda: theirs.put(next(queues[0])), lambda: ours.put(next(queues[1]))], repeats
    )
    last = prompts[-1]
    their_gets, our_gets = alternately([lambda: theirs.get(last), lambda: ours.get(last)], repeats)
    for side in (theirs, ours):
        if not all(torch.equal(out, block) for out, block in zip(side.read(), blocks, strict=True)):
            raise AssertionError(f"{type(side).__name__} returned other bytes than it was given")
    keys = ours.keys(last)
    their_lookups, first_lookups, our_lookups = alternately(
        [lambda: theirs.look_up(last), lambda: ours.look_up(last), lambda: ours.look_up(last, keys)], repeats
    )

    def result(their: list[float], our: list[float]) -> dict[str, Any]:
        ratio = median(their) / median(our)
        return {"ratio": ratio, "detail": f"{median(our) * 1e3:.3g} ms, AIBrix {median(their) * 1e3:.3g} ms"}

    return {
        "put": result(their_puts, our_puts),
        "get": result(their_gets, our_gets),
        "lookup": result(their_lookups, our_lookups),
        "first_lookup": result(their_lookups, first_lookups),
    }


if __name__ == "__main__":
    main()
