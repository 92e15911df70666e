"""The circuit breaker, by a clock that the tests turn."""

from __future__ import annotations

import pytest

from kvplug.store.l2.breaker import Breaker


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker(failures=3, first=1.0, longest=8.0, clock=clock)


def opened(breaker):
    for _ in range(3):
        breaker.failed()
    assert breaker.state == "open"
    return breaker


def test_it_opens_after_failures_in_a_row(breaker):
    """Two failures, or three with a success between them, keep it closed; three in a row open it, once."""
    assert not breaker.failed()
    assert not breaker.failed()
    breaker.succeeded()
    assert not breaker.failed()
    assert not breaker.failed()
    assert breaker.allows()
    assert breaker.failed()
    assert not breaker.allows()
    assert not breaker.failed()
    assert breaker.opened == 1


def test_one_probe_at_a_time(breaker, clock):
    """No probe before the back-off is over; then one, and no other until it has ended."""
    assert breaker.next_probe() is None
    opened(breaker)
    assert not breaker.start_probe()
    clock.now = breaker.next_probe()
    assert breaker.start_probe()
    assert breaker.state == "half_open"
    assert breaker.next_probe() is None
    assert not breaker.start_probe()
    assert not breaker.allows()


def test_a_probe_that_works_closes_it(breaker, clock):
    """It recovers by itself; what was called before it opened, and works late, doesn't close it."""
    opened(breaker)
    breaker.succeeded()
    assert not breaker.allows()
    clock.now = breaker.next_probe()
    assert breaker.start_probe()
    breaker.probed(worked=True)
    assert breaker.allows()
    assert breaker.next_probe() is None


def test_back_off_doubles_up_to_a_limit(breaker, clock):
    """Each probe that fails doubles the wait, within a fifth more or less, up to the longest."""
    opened(breaker)
    waits = []
    for _ in range(6):
        waits.append(breaker.next_probe() - clock.now)
        clock.now = breaker.next_probe()
        assert breaker.start_probe()
        breaker.probed(worked=False)
    for wait, expected in zip(waits, [1, 2, 4, 8, 8, 8], strict=True):
        assert 0.8 * expected <= wait <= 1.2 * expected
    assert breaker.opened == 1


def test_it_is_on_probation_after_a_probe(breaker, clock):
    """The first failure after a probe opens it again, with a longer wait; a call that works ends the probation."""
    opened(breaker)
    clock.now = breaker.next_probe()
    breaker.start_probe()
    breaker.probed(worked=True)
    assert breaker.failed()
    assert breaker.next_probe() - clock.now > 1.5
    clock.now = breaker.next_probe()
    breaker.start_probe()
    breaker.probed(worked=True)
    breaker.succeeded()
    assert not breaker.failed()
    assert not breaker.failed()
    assert breaker.failed()
    assert breaker.next_probe() - clock.now < 1.5


def test_it_can_start_open(breaker, clock):
    """A tier that wasn't opened yet is probed at once."""
    breaker.start_open()
    assert not breaker.allows()
    assert breaker.next_probe() == clock.now
    assert breaker.start_probe()
    breaker.probed(worked=True)
    assert breaker.allows()
