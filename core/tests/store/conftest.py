"""Lets the tests of tiers import the contract, with failures as readable as their own."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("policy_models", "tier_contract", "tiers")
