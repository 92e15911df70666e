"""Counts and observed values of one process."""

from __future__ import annotations

from kvplug.stats import MAX_OBSERVATIONS, Stats


def test_what_is_taken_is_new():
    """`take` gives growth and observations since the last call, `totals` counts since the start."""
    stats = Stats()
    stats.add("loads")
    stats.add("nothing", 0)
    stats.observe("seconds", 0.5)
    stats.observe("seconds", 0.25)
    assert stats.take() == {"loads": 1, "seconds": [0.5, 0.25]}
    stats.add("loads", 2)
    assert stats.take() == {"loads": 2}
    assert stats.take() == {}
    assert stats.totals() == {"loads": 3, "nothing": 0}


def test_observations_that_nobody_takes_are_bounded():
    """A connector that takes no stats costs no memory: the oldest values go."""
    stats = Stats()
    for number in range(MAX_OBSERVATIONS + 5):
        stats.observe("seconds", number)
    (values,) = stats.take().values()
    assert len(values) == MAX_OBSERVATIONS
    assert values[0] == 5
