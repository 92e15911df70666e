"""The tiers that other tests are made with keep to the contract themselves."""

from __future__ import annotations

import pytest
from tier_contract import TierContract
from tiers import DictTier, FaultyTier


@pytest.mark.parametrize("kind", [DictTier, FaultyTier], scope="class")
class TestTestTiers(TierContract):
    """A dict is a tier."""

    @pytest.fixture
    def new_tier(self, kind):
        values: dict[bytes, bytes] = {}
        return lambda: kind(values)
