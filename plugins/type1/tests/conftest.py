"""Fixtures of type1's unit tests."""

from __future__ import annotations

import pytest

from kvplug_type1 import scheduler, worker


@pytest.fixture(autouse=True)
def _warnings_come_again(monkeypatch):
    """Let warnings that come once a minute come in every test that provokes them."""
    for module in (scheduler, worker):
        monkeypatch.setattr(module._limited, "_seen", {})
