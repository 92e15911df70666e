"""The tier `mooncake` keeps to the contract of L2 tiers, on a real store."""

from __future__ import annotations

import pytest
from tier_contract import TierContract

pytestmark = pytest.mark.server


class TestMooncake(TierContract):
    """A Mooncake Store is a tier."""

    # Keys that were looked up or read are leased for a while.
    deletes_at_once = False
    # Mooncake keeps thread pools for good; test_mooncake.py counts that they don't grow.
    library_keeps_resources = True
