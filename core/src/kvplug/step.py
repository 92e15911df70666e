"""What a hook implementation gets to see of a scheduler step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

__all__ = ["BlockIds", "Step", "StepRequest"]

#: Block ids of one request: one tuple per KV-cache group.
BlockIds: TypeAlias = tuple[tuple[int, ...], ...]


class StepRequest:
    """One request that is scheduled in a step. Read-only, and valid until the hook returns."""

    __slots__ = (
        "_block_ids",
        "is_new",
        "is_resumed",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_scheduled_tokens",
        "num_skippable_tokens",
        "request_id",
    )

    #: vLLM's id of the request.
    request_id: str
    #: Tokens whose KV was in the paged cache before this step: computed, or found in vLLM's own prefix cache.
    num_computed_tokens: int
    #: Tokens to compute in this step, speculative ones included.
    num_scheduled_tokens: int
    #: How many of the scheduled tokens are speculative. They are the last ones.
    num_draft_tokens: int
    #: First scheduled in this step (not after a preemption).
    is_new: bool
    #: Scheduled again after it was preempted. Its block ids are new ones.
    is_resumed: bool
    #: How many tokens of this step can be skipped at most. Always leaves one to compute; 0 for requests that must not
    #: be shortened (prompt log-probabilities, pooling, prompt embeddings, encoder inputs, scheduler-side loads).
    num_skippable_tokens: int

    def __init__(  # noqa: PLR0917 - by name everywhere but where there are hundreds to make
        self,
        request_id: str,
        num_computed_tokens: int,
        num_scheduled_tokens: int,
        block_ids: BlockIds | Callable[[str], BlockIds],
        num_draft_tokens: int = 0,
        is_new: bool = False,  # noqa: FBT001, FBT002
        is_resumed: bool = False,  # noqa: FBT001, FBT002
        num_skippable_tokens: int = 0,
    ) -> None:
        """Describe a request. For kvplug's dispatcher and for tests; block ids may be asked for, by id, when read."""
        self.request_id = request_id
        self.num_computed_tokens = num_computed_tokens
        self.num_scheduled_tokens = num_scheduled_tokens
        self.num_draft_tokens = num_draft_tokens
        self.is_new = is_new
        self.is_resumed = is_resumed
        self.num_skippable_tokens = num_skippable_tokens
        self._block_ids = block_ids

    @property
    def block_ids(self) -> BlockIds:
        """Block ids in order, one tuple per KV-cache group. They cover computed and scheduled tokens.

        Block 0 is vLLM's null block: it stands where a sliding window has passed, and must be neither read nor written.
        """
        if callable(self._block_ids):
            self._block_ids = self._block_ids(self.request_id)
        return self._block_ids

    def __repr__(self) -> str:
        return (
            f"StepRequest({self.request_id!r}, num_computed_tokens={self.num_computed_tokens}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, num_skippable_tokens={self.num_skippable_tokens})"
        )


class Step:
    """One scheduler step, read-only.

    The same for every vLLM release and for both of its model runners. What isn't read isn't computed, so it is valid
    until the hook returns: copy what you keep.
    """

    __slots__ = ("_make_requests", "_requests", "finished", "metadata", "num_scheduled_tokens", "preempted")

    #: Connector metadata of this step as the connector's own scheduler half built it, or None.
    metadata: Any
    #: Ids of requests that lost their blocks since the last step.
    preempted: frozenset[str]
    #: Ids of requests that finished or were aborted since the last step.
    finished: frozenset[str]
    #: Tokens scheduled in this step, over all requests.
    num_scheduled_tokens: int

    def __init__(
        self,
        make_requests: Callable[[], Mapping[str, StepRequest]],
        *,
        metadata: Any,
        preempted: frozenset[str],
        finished: frozenset[str],
        num_scheduled_tokens: int,
    ) -> None:
        """Wrap a step. For kvplug's dispatcher and for tests."""
        self._make_requests = make_requests
        self._requests: Mapping[str, StepRequest] | None = None
        self.metadata = metadata
        self.preempted = preempted
        self.finished = finished
        self.num_scheduled_tokens = num_scheduled_tokens

    @property
    def requests(self) -> Mapping[str, StepRequest]:
        """Requests scheduled in this step, by id, in the scheduler's order."""
        if self._requests is None:
            self._requests = MappingProxyType(dict(self._make_requests()))
        return self._requests

    @property
    def new(self) -> frozenset[str]:
        """Ids of the requests that are scheduled for the first time."""
        return frozenset(r.request_id for r in self.requests.values() if r.is_new)

    @property
    def resumed(self) -> frozenset[str]:
        """Ids of the requests that are scheduled again after a preemption."""
        return frozenset(r.request_id for r in self.requests.values() if r.is_resumed)

    def __repr__(self) -> str:
        return (
            f"Step(requests={list(self.requests)}, num_scheduled_tokens={self.num_scheduled_tokens}, "
            f"preempted={sorted(self.preempted)}, finished={sorted(self.finished)})"
        )
