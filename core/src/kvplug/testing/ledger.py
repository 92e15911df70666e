"""What every request of a simulation means, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvplug.testing.errors import InvariantError
from kvplug.testing.model import VOCABULARY, TokenSequence
from kvplug.testing.records import Finished

__all__ = ["Ledger"]


class Ledger:
    """Requests by id.

    Attributes:
        sequences: The tokens of each, with all that follows its prompt.
        finished: What has come of each so far.
    """

    def __init__(self) -> None:
        self.sequences: dict[str, TokenSequence] = {}
        self.finished: dict[str, Finished] = {}

    def add(self, request_id: str, prompt: Sequence[int], identity: str) -> None:
        """Add a request, or put one in the place of a finished one. `identity` tells equal tokens apart."""
        self.sequences[request_id] = TokenSequence(prompt, identity)
        self.finished[request_id] = Finished()

    def take(self, outputs: Mapping[int, Any]) -> dict[str, list[int]]:
        """Take in the scheduler's outputs by client, and return the new tokens by request.

        Raises:
            InvariantError: A request got a token that the model doesn't generate there.
        """
        tokens: dict[str, list[int]] = {}
        for output in (output for client in outputs.values() for output in client.outputs):
            request_id = output.request_id
            finished, sequence = self.finished[request_id], self.sequences[request_id]
            start = sequence.num_prompt_tokens + len(finished.tokens)
            expected = [sequence.token(start + index) for index in range(len(output.new_token_ids))]
            if list(output.new_token_ids) != expected:
                raise InvariantError(
                    f"request {request_id!r} got {list(output.new_token_ids)} at position {start}, not {expected}"
                )
            if expected:
                finished.tokens += expected
                tokens[request_id] = expected
            if (stats := getattr(output, "prefill_stats", None)) is not None:
                finished.num_cached_tokens = stats.num_cached_tokens
                finished.num_external_tokens = stats.num_external_cached_tokens
            if output.finish_reason is not None:
                finished.reason = str(output.finish_reason)
                finished.kv_transfer_params = output.kv_transfer_params
        return tokens

    def drafts(
        self, output: Any, requests: Mapping[str, Any], num_drafts: int, accept: Callable[[str, int], bool] | None
    ) -> Any:
        """Return vLLM's `DraftTokenIds` for the next step.

        Args:
            output: The step's `ModelRunnerOutput`.
            requests: vLLM's requests, with the step's tokens.
            num_drafts: Drafts per request.
            accept: Says of a request id and a position whether the draft is right; None: all are.
        """
        from vllm.v1.outputs import DraftTokenIds

        drafts = []
        for request_id, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            request = requests.get(request_id)
            own: list[int] = []
            if sampled and request is not None:
                sequence = self.sequences[request_id]
                for position in range(request.num_tokens, request.num_tokens + num_drafts):
                    right = accept is None or accept(request_id, position)
                    own.append(sequence.token(position) if right else (sequence.token(position) + 1) % VOCABULARY)
            drafts.append(own)
        return DraftTokenIds(list(output.req_ids), drafts)
