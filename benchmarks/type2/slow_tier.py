"""An L2 tier whose lookups take long."""
# ruff: noqa: ARG002 - calls that can't hang need no time limit

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvplug.store.l2.tier import Tier, Usage

__all__ = ["LOOKUP_SECONDS", "SlowTier", "use"]

LOOKUP_SECONDS = 0.2


class SlowTier(Tier):
    """Keeps values in a dict of its process."""

    name = "slow"
    #: What is slow is the way there, which calls don't wait for each other on.
    max_calls = 16

    def __init__(self, settings: object) -> None:
        del settings
        self._values: dict[bytes, bytes] = {}

    @property
    def place(self) -> str:
        """Say where it is."""
        return "this process"

    def open(self, *, max_value_bytes: int, timeout: float) -> None:
        """Nothing to do."""

    def exists(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        """Look keys up, slowly."""
        time.sleep(LOOKUP_SECONDS)
        return [key in self._values for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], timeout: float) -> list[int | None]:
        """Read values, without the interpreter's lock, as a network or a disk would."""
        import numpy as np

        lengths: list[int | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self._values.get(key)
            if value is not None:
                np.copyto(np.frombuffer(buffer, np.uint8)[: len(value)], np.frombuffer(value, np.uint8))
            lengths.append(None if value is None else len(value))
        return lengths

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], timeout: float) -> list[bool]:
        """Keep values."""
        self._values.update((key, bytes(value)) for key, value in zip(keys, values, strict=True))
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes], timeout: float) -> None:
        """Remove values."""
        for key in keys:
            self._values.pop(key, None)

    def usage(self, timeout: float) -> Usage:
        """Count values."""
        return Usage(entries=len(self._values))

    def close(self) -> None:
        """Nothing to do."""


def use() -> None:
    """Let the setting `l2` find the tier under its name, in this process."""
    from kvplug.store import settings
    from kvplug.store.l2 import registry

    def load_tier(name: str) -> Any:
        return SlowTier if name == SlowTier.name else registry.load_tier(name)

    settings.load_tier = load_tier  # type: ignore[attr-defined]
