"""Fixtures for the halves of connectors that decide on the scheduler."""

from __future__ import annotations

import pytest

from kvplug.scheduled import lookups


@pytest.fixture
def clock(monkeypatch):
    """Return the time that deadlines go by; a test moves it on."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(lookups, "time", clock)
    return clock
