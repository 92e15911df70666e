"""The workload: conversations, sent one request at a time, and what came back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from demolib.server import Server
from demolib.text import Conversation

__all__ = ["ANSWER_TOKENS", "Meter", "Pass", "Reply", "Request", "converse", "send"]

#: Tokens of each answer.
ANSWER_TOKENS = 16

#: Tokens that a connector loaded, by its name: what type2 does, vLLM counts itself.
_LOADED = {"type1": "vllm:kvplug_tokens_loaded_total", "type2": "vllm:external_prefix_cache_hits_total"}
_LOCAL_HITS = "vllm:prefix_cache_hits_total"


@dataclass(frozen=True)
class Request:
    """One turn of a conversation, with all that was said before."""

    #: Both from 0.
    conversation: int
    turn: int
    #: As OpenAI's API takes them.
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Reply:
    """The answer to one request."""

    request: Request
    #: Seconds from sending the request to the first token of the answer.
    ttft_s: float
    prompt_tokens: int
    token_ids: tuple[int, ...]
    #: One per token.
    logprobs: tuple[float, ...]
    text: str


@dataclass(frozen=True)
class Pass:
    """The workload, sent once."""

    replies: list[Reply]
    #: Tokens that kvplug loaded meanwhile.
    tokens_loaded: int = 0
    #: Tokens that vLLM found in its own prefix cache.
    local_hits: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(reply.prompt_tokens for reply in self.replies)

    @property
    def requests(self) -> list[Request]:
        """What was sent, in order."""
        return [reply.request for reply in self.replies]

    @property
    def ttfts_s(self) -> list[float]:
        """Seconds to the first token of each request."""
        return [reply.ttft_s for reply in self.replies]


def converse(ask: Callable[[Request], Reply], conversations: Sequence[Conversation]) -> Iterator[Reply]:
    """Have the conversations: the first turn of each, then the second of each, and so on.

    Args:
        ask: Sends a request and returns the reply.
        conversations: What the users say.

    Yields:
        The replies.

    """
    histories = [[{"role": "system", "content": conversation.system}] for conversation in conversations]
    for turn, questions in enumerate(zip(*(conversation.questions for conversation in conversations), strict=True)):
        for number, (history, question) in enumerate(zip(histories, questions, strict=True)):
            history.append({"role": "user", "content": question})
            reply = ask(Request(number, turn, tuple(history)))
            history.append({"role": "assistant", "content": reply.text})
            yield reply


class Meter:
    """What a server's counters grow by during a pass."""

    def __init__(self, server: Server, connector: str) -> None:
        """Begin a pass, with `type1` or `type2`."""
        self._server = server
        self._name = _LOADED[connector]
        self._loaded = server.metric(self._name)
        self._hits = server.metric(_LOCAL_HITS)

    def read(self, replies: list[Reply]) -> Pass:
        """End it, and return it with what was answered."""
        server = self._server
        return Pass(replies, server.metric(self._name) - self._loaded, server.metric(_LOCAL_HITS) - self._hits)


def send(server: Server, request: Request) -> Reply:
    """Send a request, and time the first token of its answer.

    Raises:
        ServerError: No proper answer came.

    """
    body = {
        "model": "demo",
        "messages": request.messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first: float | None = None
    prompt_tokens = 0
    token_ids: list[int] = []
    logprobs: list[float] = []
    text = ""
    started = time.perf_counter()
    for chunk in server.stream(body):
        for choice in chunk["choices"]:
            if choice.get("token_ids") and first is None:
                first = time.perf_counter()
            token_ids += choice.get("token_ids") or ()
            logprobs += [token["logprob"] for token in (choice["logprobs"] or {"content": ()})["content"]]
            text += choice["delta"].get("content") or ""
        if chunk.get("usage"):
            prompt_tokens = chunk["usage"]["prompt_tokens"]
    if first is None or len(token_ids) != ANSWER_TOKENS or len(logprobs) != ANSWER_TOKENS:
        raise server.error(f"An answer should have {ANSWER_TOKENS} tokens, and has {len(token_ids)}.")
    return Reply(request, first - started, prompt_tokens, tuple(token_ids), tuple(logprobs), text)
