"""The tier `mooncake` keeps to the contract of L2 tiers, on a real store."""

from __future__ import annotations

import pytest
from tier_contract import TierContract, pattern

pytestmark = pytest.mark.server


class TestMooncake(TierContract):
    """A Mooncake Store is a tier."""

    # Mooncake keeps thread pools for good; test_mooncake.py counts that they don't grow.
    library_keeps_resources = True

    @pytest.fixture
    def new_tier(self, make_tier):
        return make_tier

    def test_another_tier_at_the_place_sees_it(self, new_tier):
        """Two engines that share a store find each other's values, and deletions, but for keys that are leased."""
        with self.opened(new_tier()) as one, self.opened(new_tier()) as other:
            self.put(one, {b"a": pattern(1, 1234), b"b": pattern(2, 99)})
            assert self.exists(other, [b"a", b"c"]) == [True, False]
            assert self.get(other, [b"a"]) == [pattern(1, 1234)]
            other.delete([b"a", b"b"], self.timeout)
            assert self.get(other, [b"a", b"b"]) == [None, None]
            assert self.get(one, [b"b"]) == [None]
            # `a` is leased, and stays for the others until the store evicts it.
            assert self.get(one, [b"a"]) in ([None], [pattern(1, 1234)])
