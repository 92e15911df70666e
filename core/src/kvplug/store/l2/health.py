"""Whether a tier can be used: opening it, leaving it alone while it fails, finding out when it works again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvplug.log import RateLimited, get_logger
from kvplug.store.l2.breaker import Breaker
from kvplug.store.l2.tier import Tier, TierError, TierTimeoutError

__all__ = ["Health", "said"]

logger = get_logger(__name__)
_limited = RateLimited(logger)

#: A key that is never stored: asking for it tells whether the tier answers.
_PROBE_KEY = b"kvplug probe"


class Health:
    """Opens a tier and watches over its failures. Safe from any thread.

    Args:
        tier: The tier.
        max_value_bytes: Bytes of its longest value.
        memory: Returns the memory to register.
        breaker: Decides when the tier is left alone.
        timeout: Seconds that a probe may take to count as working.
        changed: Called when the time of the next probe has changed.

    """

    def __init__(
        self,
        tier: Tier,
        *,
        max_value_bytes: int,
        memory: Callable[[], memoryview],
        breaker: Breaker,
        timeout: float,
        changed: Callable[[], None],
    ) -> None:
        self.breaker = breaker
        self._tier = tier
        self._max_value_bytes = max_value_bytes
        self._memory = memory
        self._timeout = timeout
        self._changed = changed
        self._opened = False
        self._probe: threading.Thread | None = None
        self._error: TierError | None = None

    def open(self, timeout: float) -> None:
        """Open the tier. If it can't be opened now, that is tried again in the background.

        Raises:
            TierError: It isn't open yet.

        """
        self.breaker.start_open()
        if self.breaker.start_probe():
            self._start_probe(timeout).join(timeout)
        if not self.breaker.allows():
            raise self._error or TierTimeoutError(f"{self._tier.place} didn't answer in {timeout:g} s")

    def works(self) -> bool:
        """Say whether calls may be made."""
        return self.breaker.allows()

    def succeeded(self) -> None:
        """Note a call that worked."""
        self.breaker.succeeded()

    def failed(self, reason: str) -> None:
        """Note a call that failed, or took too long."""
        _limited.warning((self._tier.name, "failed"), "L2 tier %s: %s; that is a miss.", self._tier.name, reason)
        if self.breaker.failed():
            logger.warning(
                "kvplug: L2 tier %s (%s) is left alone until it works again: %s.",
                self._tier.name,
                self._tier.place,
                reason,
            )
            self._changed()

    def next_probe(self) -> float | None:
        """Return when a probe is due, by `time.monotonic`; none while one hasn't returned."""
        return None if self._probe is not None else self.breaker.next_probe()

    def probe(self) -> None:
        """Start the probe that is due, on a thread of its own: all others may hang."""
        if self.breaker.start_probe():
            self._start_probe(self._timeout)

    def join(self, until: float) -> bool:
        """Wait for a probe that is under way, and return whether there is none."""
        probe = self._probe
        if probe is not None:
            probe.join(max(0.0, until - time.monotonic()))
        return probe is None or not probe.is_alive()

    def _start_probe(self, timeout: float) -> threading.Thread:
        probe = threading.Thread(
            target=self._run_probe, args=(timeout,), name=f"kvplug-{self._tier.name}-probe", daemon=True
        )
        self._probe = probe
        probe.start()
        return probe

    def _run_probe(self, timeout: float) -> None:
        started = time.monotonic()
        try:
            if self._opened:
                self._tier.exists([_PROBE_KEY], timeout)
            else:
                self._tier.open(max_value_bytes=self._max_value_bytes, timeout=timeout)
                self._tier.register(self._memory())
                self._opened = True
            worked = time.monotonic() - started < timeout
        except Exception as error:  # noqa: BLE001 - a client library may raise anything
            worked = False
            self._error = error if isinstance(error, TierError) else TierError(f"{self._tier.place}: {said(error)}")
            _limited.warning((self._tier.name, "probe"), "L2 tier %s doesn't work: %s.", self._tier.name, said(error))
        self._probe = None
        self.breaker.probed(worked=worked)
        if worked:
            logger.info("kvplug: L2 tier %s (%s) works.", self._tier.name, self._tier.place)
        self._changed()


def said(error: BaseException) -> str:
    """Say what went wrong, without what may have a secret in it: only a tier's own messages are written to be read."""
    if isinstance(error, TierError):
        return str(error).rstrip(".")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" in {Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
    return f"{type(error).__name__}{where}"
