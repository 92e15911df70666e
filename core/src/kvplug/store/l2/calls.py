"""Threads that make a tier's calls, and one that sees to it that none is waited for too long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvplug.log import get_logger
from kvplug.store.l2.operation import Operation, Outcome

__all__ = ["Calls", "Listener"]

logger = get_logger(__name__)

Op = Operation[Any]


class Listener:
    """Hears what becomes of calls. Its methods are called on any thread, without locks held."""

    def returned(self, error: BaseException | None, *, late: bool) -> None:
        """Note that a call has returned or raised; late if its time was up before."""

    def overdue(self, operation: Op) -> None:
        """Note that a call's time is up. It is still under way."""

    def dropped(self) -> None:
        """Note that there won't be a call: its turn didn't come in time, or the threads are being stopped."""

    def next_alarm(self) -> float | None:
        """Return when `alarm` is to be called next, by `time.monotonic`. Must not call back: a lock is held."""

    def alarm(self) -> None:
        """Do what was to be done at that time, without blocking."""


class Calls:
    """Makes calls on a few threads, which begin when they are needed.

    Threads are daemons: a call that never returns keeps no process from ending.

    Args:
        name: Of the threads.
        max_calls: Calls under way at the same time, at least 1. Those that nobody waits for leave one thread free for
            those that somebody does, if there are two.
        listener: Hears what becomes of calls.

    """

    def __init__(self, name: str, max_calls: int, listener: Listener) -> None:
        self._name = name
        self._max_calls = max_calls
        self._max_background = max(1, max_calls - 1)
        self._listener = listener
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._watch = threading.Condition(self._lock)
        self._quiet = threading.Condition(self._lock)
        self._urgent: deque[Op] = deque()
        self._background: deque[Op] = deque()
        self._running: set[Op] = set()
        # Calls whose time was up and which are still under way: their threads are of no use meanwhile.
        self._overdue: set[Op] = set()
        # Operations that have ended, and of which somebody is being told: that may lead to the next one.
        self._telling = 0
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._watcher: threading.Thread | None = None
        self._closed = False

    @property
    def under_way(self) -> int:
        """Calls that haven't returned, those included whose time is up."""
        with self._lock:
            return len(self._running) + len(self._overdue)

    def submit(self, operation: Op) -> None:
        """Have a call made when its turn comes.

        Raises:
            RuntimeError: There can't be another thread. The operation will not be released.

        """
        with self._lock:
            closed = self._closed
            self._telling += closed
            if not closed:
                # Threads first: where none can be started, there is no operation either.
                self._watch_over()
                if len(self._urgent) + len(self._background) >= self._idle and len(self._threads) < self._max_calls:
                    self._start_thread()
                (self._urgent if operation.urgent else self._background).append(operation)
                self._work.notify()
                self._watch.notify()
        if closed:
            self._drop([operation])

    def cancel(self, operations: Iterable[Op]) -> None:
        """Drop those operations whose calls haven't begun. The others go on."""
        cancelled = []
        with self._lock:
            for operation in operations:
                for queue in (self._urgent, self._background):
                    if operation in queue:
                        queue.remove(operation)
                        cancelled.append(operation)
            self._telling += len(cancelled)
        self._drop(cancelled, asked=True)

    def hasten(self, operation: Op) -> None:
        """Let an operation go before those that nobody waits for."""
        with self._lock:
            if operation in self._background:
                self._background.remove(operation)
                operation.urgent = True
                self._urgent.append(operation)
                self._work.notify()

    def poke(self) -> None:
        """Ask the listener again when its next alarm is."""
        with self._lock:
            if not self._closed:
                self._watch_over()

    def drain(self, until: float) -> bool:
        """Wait until nothing is under way or waits for its turn, and return whether that is so.

        What follows from an operation has been done by then, too. Not to be called from there.

        Args:
            until: By `time.monotonic`.

        """
        with self._lock:
            return self._quiet.wait_for(self._is_quiet, max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Drop what waits for its turn, and take no more. What is under way ends by itself. See `join`."""
        with self._lock:
            self._closed = True
            waiting = [*self._urgent, *self._background]
            self._telling += len(waiting)
            self._urgent.clear()
            self._background.clear()
            self._work.notify_all()
            self._watch.notify_all()
        self._drop(waiting)

    def join(self, until: float) -> bool:
        """Wait for the threads of closed `Calls` to end, and return whether they have."""
        threads = [*self._threads, *([self._watcher] if self._watcher else [])]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads if thread is not threading.current_thread())

    # -- With the lock held --------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _watch_over(self) -> None:
        if self._watcher is None:
            watcher = threading.Thread(target=self._watch_calls, name=f"{self._name}-watch", daemon=True)
            watcher.start()
            self._watcher = watcher
        self._watch.notify()

    def _next(self) -> Op | None:
        background = sum(not operation.urgent for operation in (*self._running, *self._overdue))
        if self._urgent:
            operation = self._urgent.popleft()
        elif self._background and background < self._max_background:
            operation = self._background.popleft()
        else:
            return None
        operation.started = time.monotonic()
        self._running.add(operation)
        self._watch.notify()
        return operation

    # -- Threads -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while (operation := self._next()) is None and not self._closed:
                    self._work.wait()
                self._idle -= 1
            if operation is None:
                return
            result, error = None, None
            try:
                result = operation.call(operation.timeout)
            except BaseException as raised:  # noqa: BLE001 - a client library may raise anything, and the thread is ours
                error = raised
            self._returned(operation, result, error)
            # Not kept until the next one comes: it holds memory.
            del operation, result, error

    def _returned(self, operation: Op, result: Any, error: BaseException | None) -> None:
        with self._lock:
            self._running.discard(operation)
            self._overdue.discard(operation)
            self._telling += 1
            late = operation.outcome is not Outcome.PENDING
            if not late:
                operation.outcome = Outcome.DONE if error is None else Outcome.FAILED
            if self._background:
                self._work.notify()  # one more of them may go now
        if not late and error is None:
            operation.result = result
        self._tell(self._listener.returned, error, late=late)
        self._release(operation, result)
        operation.end()
        self._settle(1)

    def _watch_calls(self) -> None:
        while True:
            with self._lock:
                if self._closed and not self._running:
                    return
                now = time.monotonic()
                overdue = [operation for operation in self._running if operation.deadline <= now]
                self._running.difference_update(overdue)
                self._overdue.update(overdue)
                expired = []
                for queue in (self._urgent, self._background):
                    expired += [operation for operation in queue if operation.deadline <= now]
                for operation in expired:
                    (self._urgent if operation.urgent else self._background).remove(operation)
                self._telling += len(expired)
                for operation in overdue:
                    operation.outcome = Outcome.TIMEOUT
                alarm = None if self._closed else self._listener.next_alarm()
                ring = alarm is not None and alarm <= now
                if not (overdue or expired or ring):
                    deadlines = [one.deadline for one in (*self._running, *self._urgent, *self._background)]
                    deadlines += [] if alarm is None else [alarm]
                    self._watch.wait(max(0.0, min(deadlines) - now) if deadlines else None)
                    continue
            for operation in overdue:
                self._tell(self._listener.overdue, operation)
                operation.end()
            self._drop(expired)
            if ring:
                self._tell(self._listener.alarm)
            self._settle(0)

    def _drop(self, operations: Sequence[Op], *, asked: bool = False) -> None:
        """End operations that were taken out of the queues, and counted as `_telling`."""
        for operation in operations:
            operation.outcome = Outcome.DROPPED
            if not asked:
                self._tell(self._listener.dropped)
            self._release(operation, None)
            operation.end()
        self._settle(len(operations))

    def _release(self, operation: Op, result: Any) -> None:
        released, operation.released = operation.released, None
        if released is not None:
            self._tell(released, result)

    def _is_quiet(self) -> bool:
        return not (self._running or self._urgent or self._background or self._telling)

    def _settle(self, told: int) -> None:
        with self._lock:
            self._telling -= told
            if self._is_quiet():
                self._quiet.notify_all()

    @staticmethod
    def _tell(what: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            what(*args, **kwargs)
        except Exception:
            logger.exception("kvplug: what follows a call to an L2 tier failed")
