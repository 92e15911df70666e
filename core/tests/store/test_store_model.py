"""A store driven at random, with each policy, over tiers in memory and on disk."""

from __future__ import annotations

import itertools

import pytest
from store_model import check_store
from tiers import DictTier

from kvplug.store.policies import policy_names


def _dicts():
    values = {}
    return lambda: DictTier(values)


def _small_dicts():
    values = {}
    return lambda: DictTier(values, capacity=10 * 320)


@pytest.mark.parametrize("writes", ["all", "hits", "evicted"])
@pytest.mark.parametrize("eviction", policy_names())
def test_every_policy(eviction, writes):
    """Thousands of random steps: no block is ever wrong, none is lost that must be there, nothing stays held."""
    check_store(_dicts, eviction=eviction, writes=writes, examples=25)


def test_a_tier_that_is_full():
    """A tier that has no room for most of what it is given."""
    check_store(_small_dicts, examples=25)


def test_disk(tmp_path):
    """The disk tier, with restarts that find what it holds."""
    from kvplug.store.l2.disk import DiskTier

    numbers = itertools.count()

    def new_place():
        path = tmp_path / str(next(numbers))
        return lambda: DiskTier(DiskTier.Settings(disk_path=path, disk_size="64MiB"))

    check_store(new_place, examples=8, steps=40)
