"""What a simulation keeps account of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finished", "Promise", "Statistics"]


@dataclass(frozen=True)
class Promise:
    """Tokens that the connector promised, as vLLM allocated blocks for them.

    Attributes:
        request_id: The request.
        num_tokens: External tokens.
        step: Number of the step, from 1.
    """

    request_id: str
    num_tokens: int
    step: int


@dataclass
class Finished:
    """What became of a request.

    Attributes:
        tokens: Generated token ids.
        reason: vLLM's finish reason: "length", "stop", "abort" or "error".
        num_cached_tokens: Prompt tokens that weren't computed when it was first scheduled.
        num_external_tokens: How many of those came from the connector.
        kv_transfer_params: What the connector's `request_finished` returned.
    """

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Statistics:
    """Counters over a simulation's life.

    Attributes:
        steps: Steps scheduled.
        empty_steps: Those with no token.
        scheduled_tokens: Tokens scheduled, computed again after preemption and drafts among them.
        preemptions: Requests preempted.
        promises: What the connector promised, in order.
    """

    steps: int = 0
    empty_steps: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    promises: list[Promise] = field(default_factory=list)

    @property
    def promised_tokens(self) -> int:
        """External tokens promised in all."""
        return sum(promise.num_tokens for promise in self.promises)
