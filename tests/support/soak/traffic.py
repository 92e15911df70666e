"""Requests of a soak: short, with shared prefixes, follow-ups, salts and stop tokens, all from one seed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from support.models import BYTES

#: Longest prompt, in tokens.
LONGEST_PROMPT = 200

_STEMS = 10
#: Requests until another stem takes an old one's place.
_STEM_LIFE = 60
_SALTS = ("tenant-a", "tenant-b")


@dataclass(frozen=True)
class Ask:
    """One request of the soak."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    salt: str | None = None
    #: Token ids that end the output.
    stops: tuple[int, ...] = ()
    #: Whether the output is compared to a plain engine's.
    sampled: bool = False
    prompt_logprobs: bool = False
    #: Steps after which the client goes away.
    abort_after: int | None = None

    def add_to(self, llm: Any, request_id: str | None = None) -> str:
        """Hand the request to an engine, under its number or another id; return the id."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        request_id = request_id or f"soak-{self.number}"
        prompt = TokensPrompt(prompt_token_ids=list(self.prompt))
        if self.salt is not None:
            prompt["cache_salt"] = self.salt
        parameters = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=self.max_tokens,
            stop_token_ids=list(self.stops) or None,
            logprobs=5 if self.sampled else None,
            prompt_logprobs=1 if self.prompt_logprobs else None,
        )
        llm.llm_engine.add_request(request_id, prompt, parameters)
        return request_id


class Traffic:
    """An endless stream of requests. The same seed, with the same answers, gives the same stream."""

    def __init__(self, seed: int, burst: int) -> None:
        """Start a stream.

        Args:
            seed: Decides all requests.
            burst: So many requests in a row, of ten times as many, have short prompts and long outputs: together they
                outgrow vLLM's cache, and some are preempted.

        """
        self.seed = seed
        self._burst = burst
        self._rng = random.Random(seed)
        self._count = 0
        self._stems = [self._tokens(self._rng.randrange(33, 161)) for _ in range(_STEMS)]
        # Conversations that may go on.
        self._answered: deque[tuple[int, ...]] = deque(maxlen=8)

    def next(self) -> Ask:
        """Make the next request."""
        rng = self._rng
        self._count += 1
        if self._count % _STEM_LIFE == 0:
            self._stems[rng.randrange(_STEMS)] = self._tokens(rng.randrange(33, 161))
        if self._answered and rng.random() < 0.15:
            start = rng.choice(self._answered)
        else:
            start = self._stems[min(rng.randrange(_STEMS), rng.randrange(_STEMS))]  # the first ones are asked most
        prompt = (*start, *self._tokens(rng.randrange(1, 60)))[:LONGEST_PROMPT]
        max_tokens = rng.randrange(1, 5)
        if self._count % (10 * self._burst) < self._burst:
            prompt = prompt[-rng.randrange(20, 60) :]
            max_tokens = rng.randrange(30, 60)
        return Ask(
            number=self._count,
            prompt=prompt,
            max_tokens=max_tokens,
            salt=rng.choice(_SALTS) if rng.random() < 0.1 else None,
            # Any of these comes soon, when nobody knows.
            stops=tuple(rng.sample(range(BYTES), 30)) if rng.random() < 0.2 else (),
            sampled=rng.random() < 0.06,
            prompt_logprobs=rng.random() < 0.02,
            abort_after=rng.randrange(8) if rng.random() < 0.1 else None,
        )

    def answered(self, ask: Ask, tokens: list[int]) -> None:
        """Take an answer in: a later request may continue the conversation."""
        conversation = (*ask.prompt, *tokens)
        if ask.salt is None and len(conversation) < LONGEST_PROMPT:
            self._answered.append(conversation)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(BYTES) for _ in range(count))
