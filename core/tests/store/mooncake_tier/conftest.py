"""Stores to test the tier `mooncake` with."""

from __future__ import annotations

import pytest

from support import mooncake

MIB = 1 << 20


@pytest.fixture(scope="session")
def client_library():
    """Make Mooncake's client importable, or skip."""
    missing = mooncake.missing()
    if missing:
        pytest.skip(missing)
    mooncake.preload()


@pytest.fixture(scope="session")
def session_store(client_library):
    with mooncake.mooncake_store(128 * MIB) as store:
        yield store


@pytest.fixture
def store(session_store):
    """Return a store with one node, 128 MiB and no keys."""
    session_store.clear()
    return session_store


@pytest.fixture
def make_tier(store):
    """Make tiers of `store`, or of another; they are closed at the end."""
    from kvplug.store.l2.mooncake import MooncakeTier

    tiers = []

    def make(at=None, **settings):
        tier = MooncakeTier(MooncakeTier.Settings(mooncake_master=(at or store).address, **settings))
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()
