"""Whose KV a running request has: what others loaded, or what is from before a reset, isn't ours to store."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Provenance"]


class Provenance:
    """Remembers the requests whose blocks must not be stored.

    Another connector (under `MultiConnector`) may load the start of a request within a step. Such a load may turn out
    to have failed once the step's result is in. Until then its blocks can be found in vLLM's own prefix cache, so
    requests that start meanwhile may share them, and are held.

    Args:
        steps_in_flight: Steps that may be scheduled before the first one's result is known.

    """

    def __init__(self, steps_in_flight: int) -> None:
        self._steps_in_flight = steps_in_flight
        # Steps until the result of the last one with another connector's loads is known.
        self._unsure_steps = 0
        self._tainted: set[str] = set()
        self._held: set[str] = set()

    def may_save(self, request_id: str) -> bool:
        """Say whether a request's blocks may be stored."""
        return request_id not in self._tainted and request_id not in self._held

    def may_load(self, request_id: str) -> bool:
        """Say whether stored blocks may follow what a request has."""
        return request_id not in self._tainted

    def start_step(self, starting: Iterable[tuple[str, bool]]) -> None:
        """Take in which requests start, or start again, in a step.

        Args:
            starting: Ids of requests, and whether another connector loads part of them in this step.

        """
        if self._unsure_steps:
            self._unsure_steps -= 1
            if not self._unsure_steps:
                self._held.clear()
        started = []
        for request_id, foreign in starting:
            started.append(request_id)
            if foreign:
                self._tainted.add(request_id)
                self._unsure_steps = self._steps_in_flight
            else:
                self._tainted.discard(request_id)
        if self._unsure_steps:
            self._held.update(started)

    def reset(self, request_ids: Iterable[str]) -> None:
        """Distrust what these requests have, until they start again."""
        self._tainted.update(request_ids)

    def forget(self, request_id: str) -> None:
        """Forget a request that has finished."""
        self._tainted.discard(request_id)
        self._held.discard(request_id)
