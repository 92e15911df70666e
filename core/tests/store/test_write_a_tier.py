"""The tier in docs/write-a-tier.md is a tier, and a store works over it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from store_model import check_store
from tier_contract import TierContract

PAGE = Path(__file__).resolve().parents[3] / "docs" / "write-a-tier.md"


def _of_the_page():
    """Return the page's tier, and its settings."""
    code = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)[1]
    module = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), module)
    return module["FolderTier"]


FolderTier = _of_the_page()


class TestThePagesTier(TierContract):
    """What the page shows keeps to what it says."""

    @pytest.fixture
    def new_tier(self, tmp_path):
        return lambda: FolderTier(FolderTier.Settings(folder_path=tmp_path / "values"))


def test_a_store_over_the_pages_tier(tmp_path):
    """Random steps over it: no block is ever wrong."""
    numbers = itertools.count()

    def new_place():
        path = tmp_path / str(next(numbers))
        return lambda: FolderTier(FolderTier.Settings(folder_path=path))

    check_store(new_place, examples=4, steps=30)
