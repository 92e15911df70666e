"""An L2 tier for engine tests that hangs, or damages what it keeps, when the test says so.

`use` makes it known in the process of a job, as if a distribution declared it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvplug.store.l2.tier import Tier, Usage

__all__ = ["FaultyTier", "use"]


class FaultyTier(Tier):
    """Keeps values in a dict of its process."""

    name = "faulty"
    #: Values outlive the engine, not the process.
    values: dict[bytes, bytes] = {}  # noqa: RUF012 - one place for all
    going = threading.Event()
    calls: int = 0

    def __init__(self, settings: object) -> None:
        del settings
        FaultyTier.going.set()

    @property
    def place(self) -> str:
        """Say where it is."""
        return "10.0.0.1:6379"

    def open(self, *, max_value_bytes: int, timeout: float) -> None:
        """Nothing to do."""

    def _call(self) -> None:
        FaultyTier.calls += 1
        self.going.wait(120)

    def exists(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        """Look keys up."""
        self._call()
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], timeout: float) -> list[int | None]:
        """Read values."""
        self._call()
        lengths: list[int | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self.values.get(key)
            if value is not None:
                buffer[: len(value)] = value
            lengths.append(None if value is None else len(value))
        return lengths

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], timeout: float) -> list[bool]:
        """Keep values."""
        self._call()
        self.values.update((key, bytes(value)) for key, value in zip(keys, values, strict=True))
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes], timeout: float) -> None:
        """Remove values."""
        for key in keys:
            self.values.pop(key, None)

    def usage(self, timeout: float) -> Usage:
        """Count values."""
        return Usage(entries=len(self.values))

    def close(self) -> None:
        """Let calls that hang end."""
        self.going.set()


def use() -> None:
    """Let the setting `l2` find the tier under its name, in this process."""
    from kvplug.store import settings
    from kvplug.store.l2 import registry

    def load_tier(name: str) -> Any:
        return FaultyTier if name == FaultyTier.name else registry.load_tier(name)

    settings.load_tier = load_tier  # type: ignore[attr-defined]


def flip_a_bit_of_each_value() -> None:
    """Damage every value in the middle of its block."""
    for key, value in FaultyTier.values.items():
        damaged = bytearray(value)
        # The exponent of a float32, so that the difference is large.
        position = 64 + (len(value) - 64) // 8 * 4 + 3
        damaged[position] ^= 0x20
        FaultyTier.values[key] = bytes(damaged)
