"""Several files of one call at a time: what happens when one of them fails."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from kvplug.store.l2.disk.together import THREADS, together


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "kvplug-l2-disk"]


@pytest.mark.parametrize("number", [0, 1, 2, 7])
def test_each_call_is_made_once(number):
    """Every index is called, once, and there is nothing to raise; the threads have ended."""
    called = []
    assert together(called.append, number) == (number, None)
    assert sorted(called) == list(range(number))
    assert _threads() == []


def test_two_are_made_at_a_time():
    """The calls overlap: each of the first two waits until the other has begun."""
    both = threading.Barrier(THREADS)
    assert together(lambda _: both.wait(30), THREADS) == (THREADS, None)


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_the_first_that_failed_is_what_counts(failing):
    """Two calls under way at a time, the second of which ends first: the answer is the first index that has failed."""
    both, second_ended = threading.Barrier(2), threading.Event()
    errors = {index: OSError(index) for index in failing}

    def call(index):
        both.wait(30)
        if index == 0:
            assert second_ended.wait(30)
        try:
            if index in errors:
                raise errors[index]
        finally:
            if index == 1:
                second_ended.set()

    first, error = together(call, 2)
    assert first == min(failing)
    assert error is errors[first]


@pytest.mark.parametrize("failing", [0, 3, 9])
def test_nothing_is_begun_after_a_failure(failing):
    """All before the first that failed have ended; of those behind it, only what was under way has begun."""
    ended, begun = [], []

    def call(index):
        begun.append(index)
        if index == failing:
            raise OSError("EIO")
        if index > failing:
            time.sleep(0.001)  # lets the other thread note its failure
            return
        ended.append(index)

    first, error = together(call, 1000)
    assert (first, str(error)) == (failing, "EIO")
    assert sorted(ended) == list(range(failing))
    assert len(begun) < 1000


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_is_raised_is_given_back(kind):
    """An interrupt, or an exit, is no other than an error: it ends no thread unseen, and reaches the caller."""

    def call(index):
        if index == 1:
            raise kind

    first, error = together(call, 4)
    assert first == 1
    assert type(error) is kind
    assert _threads() == []


def test_an_interrupt_between_calls_waits_for_the_other_thread(monkeypatch):
    """An interrupt of this thread is raised when the helper has ended: the caller gives the memory back after it."""
    begun, go_on, ended = threading.Event(), threading.Event(), []
    join = threading.Thread.join

    def joined(thread, *rest):
        assert begun.wait(30)
        assert ended == []
        go_on.set()
        join(thread, *rest)

    class Lock:
        """Interrupts whoever isn't the helper when it comes for a call."""

        def __enter__(self):
            if threading.current_thread().name != "kvplug-l2-disk":
                raise KeyboardInterrupt

        def __exit__(self, *_):
            pass

    def call(index):
        begun.set()
        assert go_on.wait(30)
        ended.append(index)

    own_threading = SimpleNamespace(Lock=Lock, Thread=threading.Thread)
    monkeypatch.setattr("kvplug.store.l2.disk.together.threading", own_threading)
    monkeypatch.setattr(threading.Thread, "join", joined)
    with pytest.raises(KeyboardInterrupt):
        together(call, 2)
    assert ended == [0, 1]


def test_without_a_second_thread_all_calls_are_made_here(monkeypatch):
    """Where no thread can be started, this one makes all calls, in order, and stops at the first that fails."""
    started, called = [], []

    def start(thread):
        started.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert together(lambda index: called.append((index, threading.current_thread())), 5) == (5, None)
    assert started
    assert called == [(index, threading.current_thread()) for index in range(5)]

    def call(index):
        if index == 2:
            raise OSError("EIO")

    assert together(call, 5)[0] == 2
