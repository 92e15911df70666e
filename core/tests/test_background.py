"""Copies beside compute on a thread, and waiting for something to happen."""

from __future__ import annotations

import threading
import time

import pytest

from kvplug.paged import Transfer
from kvplug.paged.background import Background, Progress

SHORT = 0.05


@pytest.fixture
def background():
    ended = []
    made = Background(threaded=True, name="test-copies", notify=lambda: ended.append(threading.current_thread().name))
    made.ended = ended
    yield made
    made.close()


def test_copies_run_one_after_the_other_beside_the_caller(background):
    """`start` returns at once; copies run in order on a thread with the name given, and each end is told there."""
    gate, order = threading.Event(), []

    def copy(number):
        def run():
            assert gate.wait(30)
            order.append((number, threading.current_thread().name))
            return Transfer()

        return run

    transfers = [background.start(copy(number)) for number in range(4)]
    assert not any(transfer.done() for transfer in transfers)
    gate.set()
    for transfer in transfers:
        transfer.wait()
        assert transfer.done()
    assert [number for number, _ in order] == [0, 1, 2, 3]
    assert {name for _, name in order} == {"test-copies_0"}
    background.close()
    assert len(background.ended) == 4


def test_a_copy_that_raises_says_so_whenever_it_is_asked(background):
    """The error comes out of each method, every time; copies after it run."""

    def fail():
        raise OSError("no")

    failed = background.start(fail)
    after = background.start(Transfer)
    after.wait()
    for _ in range(2):
        for method in (failed.wait, failed.done, failed.hold_compute):
            with pytest.raises(OSError, match="no"):
                method()


def test_a_copy_may_itself_take_time(background):
    """What the thread has started ends later, as on a device: the transfer has ended when that has."""

    class Event:
        over = False

        def query(self):
            return self.over

        def synchronize(self):
            self.over = True

    event = Event()
    transfer = background.start(lambda: Transfer(event))
    time.sleep(SHORT)
    assert not transfer.done()
    transfer.hold_compute()
    assert event.over
    assert transfer.done()


def test_without_a_thread_a_copy_starts_at_once():
    """A device's copies run by themselves: the function is called by `start`."""
    called = []
    background = Background(threaded=False, name="none")
    transfer = Transfer()
    assert background.start(lambda: (called.append(threading.current_thread()), transfer)[1]) is transfer
    assert called == [threading.current_thread()]
    background.close()


def test_close_waits(background):
    """What was started ends before the thread does."""
    over = []
    background.start(lambda: (time.sleep(SHORT), over.append(1), Transfer())[2])
    background.close()
    assert over == [1]


def test_progress_wakes_up_who_waits():
    """At once if something has ended since the last call, else when it does, or when time is up."""
    progress = Progress()
    start = time.monotonic()
    progress.wait(SHORT)
    assert time.monotonic() - start >= SHORT * 0.9
    progress.notify()
    progress.wait(30)
    threading.Timer(SHORT, progress.notify).start()
    progress.wait(30)
    assert time.monotonic() - start < 20
