"""Which requests' blocks aren't ours to store: others loaded them, or they are from before a reset."""

from __future__ import annotations

import pytest

from kvplug.provenance import Provenance


def test_what_is_computed_here_may_be_stored():
    """A request that starts with nothing, or with vLLM's own blocks, may be stored from its first step on."""
    provenance = Provenance(1)
    provenance.start_step([("a", False)])
    assert provenance.may_save("a")
    assert provenance.may_load("a")


def test_what_another_connector_loads_may_not():
    """Neither stored nor continued with stored blocks, until it starts again without."""
    provenance = Provenance(1)
    provenance.start_step([("a", True)])
    for _ in range(5):
        assert not provenance.may_save("a")
        assert not provenance.may_load("a")
        provenance.start_step([])
    provenance.start_step([("a", False)])
    assert provenance.may_load("a")
    assert provenance.may_save("a")


@pytest.mark.parametrize("in_flight", [1, 2])
def test_who_may_share_unsure_blocks_is_held(in_flight):
    """A load that failed is known with its step's result; who starts meanwhile may share its blocks."""
    provenance = Provenance(in_flight)
    provenance.start_step([("before", False)])
    provenance.start_step([("foreign", True), ("same step", False)])
    assert provenance.may_save("before")
    assert not provenance.may_save("same step")
    assert provenance.may_load("same step")
    for number in range(1, in_flight):
        provenance.start_step([(f"later {number}", False)])
        assert not provenance.may_save(f"later {number}")
        assert not provenance.may_save("same step")
    provenance.start_step([("after", False)])
    assert provenance.may_save("after")
    assert provenance.may_save("same step")
    assert not provenance.may_save("foreign")


def test_d9_a_reset_distrusts_what_runs():
    """D9: what running requests have is based on what was to be forgotten, until they start again."""
    provenance = Provenance(1)
    provenance.start_step([("a", False), ("b", False)])
    provenance.reset(["a"])
    assert not provenance.may_save("a")
    assert provenance.may_save("b")
    provenance.start_step([("a", False)])
    assert provenance.may_save("a")


def test_nothing_is_remembered_of_finished_requests():
    """An id that is used again starts anew."""
    provenance = Provenance(2)
    provenance.start_step([("a", True), ("b", False)])
    for name in ("a", "b", "unknown"):
        provenance.forget(name)
    assert provenance.may_save("a")
    assert provenance.may_save("b")
    assert not provenance._tainted
    assert not provenance._held
