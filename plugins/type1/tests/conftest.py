"""Fixtures of type1's unit tests."""

from __future__ import annotations

import pytest

from kvplug import request_keys
from kvplug_type1 import worker


@pytest.fixture(autouse=True)
def _warnings_come_again(monkeypatch):
    """Let warnings that come once a minute come in every test that provokes them."""
    for module in (request_keys, worker):
        monkeypatch.setattr(module._limited, "_seen", {})
