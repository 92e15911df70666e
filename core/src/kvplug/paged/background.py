"""Copies that run beside compute: on a stream of their own on a GPU, on a thread of their own on a CPU."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvplug.paged.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Background", "Followers", "Progress"]


class Background:
    """Starts copies one after the other, and returns before they have run.

    What it is given is a function that starts a copy without holding compute back (`PagedCache.gather`, `scatter` with
    `hold=False`). Copies of a GPU run on their stream by themselves, so the function is called at once. Copies of a CPU
    run on the thread that calls them, so that is a thread of this object; they don't hold the interpreter's lock.

    Args:
        threaded: Whether to use a thread: True for CPUs.
        name: Of the thread.
        notify: Called on the thread after each copy.

    """

    def __init__(self, *, threaded: bool, name: str, notify: Callable[[], None] = lambda: None) -> None:
        self._notify = notify
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name) if threaded else None

    def start(self, copy: Callable[[], Transfer]) -> Transfer:
        """Start a copy, after those started before.

        Returns:
            The transfer. If the copy raises, that comes out of its methods.

        """
        if self._executor is None:
            return copy()
        future = self._executor.submit(copy)
        future.add_done_callback(lambda _: self._notify())
        return Transfer(_Copied(future))

    def close(self) -> None:
        """Wait for what was started, and end the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


class _Copied:
    """The end of a copy on a thread, as an event."""

    def __init__(self, future: Future[Transfer]) -> None:
        self._future = future

    def synchronize(self) -> None:
        self._future.result().wait()

    def query(self) -> bool:
        return self._future.done() and self._future.result().done()


class Followers:
    """Does what has to wait for copies, on a thread of its own, in the order in which it was asked for."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def follow(
        self, transfers: Sequence[Transfer], then: Callable[[], object], otherwise: Callable[[], object]
    ) -> None:
        """Do something when all of these have ended, or something else if one has failed.

        Args:
            transfers: The copies.
            then: Called, on the thread, when they have ended.
            otherwise: Called instead if one of them raises.

        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvplug-follow")
        self._executor.submit(self._wait, tuple(transfers), then, otherwise)

    @staticmethod
    def _wait(transfers: Sequence[Transfer], then: Callable[[], object], otherwise: Callable[[], object]) -> None:
        try:
            for transfer in transfers:
                transfer.wait()
        except Exception:  # noqa: BLE001 - whoever started the copy tells of it
            otherwise()
        else:
            then()

    def close(self) -> None:
        """Do what there is to do, and end the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


class Progress:
    """Lets a step without tokens wait a moment for something to happen, instead of coming again at once."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def notify(self) -> None:
        """Say that something has ended. From any thread."""
        self._happened.set()

    def wait(self, timeout: float) -> None:
        """Return when something has ended since the last call, or after so many seconds."""
        self._happened.wait(timeout)
        self._happened.clear()
