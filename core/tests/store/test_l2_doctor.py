"""`kvplug doctor` on L2 tiers: which are named, where they are, and what they lack."""

from __future__ import annotations

from types import SimpleNamespace

from tiers import DictTier

from kvplug.cli.checks import _tiers
from kvplug.cli.tiers import tiers_of
from kvplug.store.l2.tier import TierError


class Unusable(DictTier):
    """Lacks its library."""

    name = "unusable"

    def __init__(self, settings):
        raise TierError("The tier unusable needs a library: pip install 'kvplug[unusable]'")


class Secretive(DictTier):
    """Fails with a secret in its message."""

    name = "secretive"

    def __init__(self, settings):
        raise ValueError("secretive://user:hunter2@host")


def test_each_tier_is_reported():
    """A usable tier is named with its place, another with what to do; no secret of an error is shown."""
    rows = tiers_of(SimpleNamespace(tiers=(DictTier, Unusable, Secretive)))
    findings = list(_tiers(rows))
    assert [finding.status for finding in findings] == ["ok", "problem", "problem"]
    assert findings[0].text == "L2 tier dict: a dict (not tried)."
    assert "pip install 'kvplug[unusable]'" in findings[1].remedy
    assert "hunter2" not in str(findings)
    assert tiers_of(SimpleNamespace()) == []
