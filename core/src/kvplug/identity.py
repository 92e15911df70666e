"""What, besides its tokens, decides a request's KV: LoRA adapter, multimodal items, cache salt.

It is read from the fields of vLLM's own `Request`. vLLM has a function that collects such things for its own hashes,
but what that returns changed several times between 0.14 and 0.33, and it names an adapter instead of looking at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvplug.digest import tagged_digest
from kvplug.lora import AdapterIdentities, AdapterUnreadableError

__all__ = ["MultiModalFeature", "RequestIdentity", "Uncacheable", "identity_of"]


class MultiModalFeature(NamedTuple):
    """One image, video or audio item in a request's prompt.

    Attributes:
        offset: Position of its first placeholder token in the request.
        length: Number of its placeholder tokens.
        identifier: What stands for its content: vLLM's hash of it, or an id that the client gave.

    """

    offset: int
    length: int
    identifier: str

    @property
    def stop(self) -> int:
        """Position after its last placeholder token."""
        return self.offset + self.length


@dataclass(frozen=True)
class RequestIdentity:
    """What, besides the tokens, goes into a request's block keys."""

    #: Digest of the LoRA adapter's content, or None.
    lora: bytes | None = None
    #: Multimodal items in order of their position.
    features: tuple[MultiModalFeature, ...] = ()
    #: Digest of the cache salt, or None. The salt itself is kept nowhere.
    salt: bytes | None = None

    def __post_init__(self) -> None:
        """Put the features in order."""
        object.__setattr__(self, "features", tuple(sorted(self.features)))


@dataclass(frozen=True)
class Uncacheable:
    """Why a request's KV can neither be stored nor loaded."""

    #: The kind of reason, for counters and rate-limited logging: `lora`, `multimodal`, `prompt_embeds`, `session`,
    #: `vllm`.
    kind: str
    #: The reason, one sentence.
    reason: str

    def __str__(self) -> str:
        return self.reason


#: For callers with one engine in the process. Those that may have several make their own.
_ADAPTERS = AdapterIdentities()


def identity_of(request: Any, adapters: AdapterIdentities = _ADAPTERS) -> RequestIdentity | Uncacheable:
    """Say what identifies a request's KV, or why it must not be cached.

    Args:
        request: vLLM's `Request`, on the scheduler side. The worker's view of a request has no cache salt, so keys
            can't be made there.
        adapters: Remembers LoRA adapters of one engine.

    Returns:
        The identity; or `Uncacheable` for prompt embeddings (their content has no ids), streaming sessions (vLLM
        replaces tokens of them that it had before), LoRA adapters whose content isn't known, and multimodal items
        without an identifier. A field that this vLLM doesn't have makes a request uncacheable too, rather than equal
        to one in which it is unset.

    """
    if getattr(request, "prompt_embeds", None) is not None:
        return Uncacheable("prompt_embeds", "KV of prompt embeddings isn't cached.")
    if getattr(request, "resumable", False):
        return Uncacheable("session", "KV of streaming sessions isn't cached: their tokens are replaced later.")
    try:
        lora_request, items, salt = request.lora_request, request.mm_features, request.cache_salt
    except AttributeError as error:
        return Uncacheable("vllm", f"This vLLM's requests aren't known well enough to be cached: {error}.")
    features: list[MultiModalFeature] = []
    for item in items or ():
        # The identifier may be the hash behind the adapter's name. The adapter's content is in the keys anyway, and its
        # name shouldn't be.
        identifier = getattr(item, "mm_hash", None) or getattr(item, "identifier", None)
        if not identifier:
            return Uncacheable("multimodal", "A multimodal item has no identifier.")
        features.append(MultiModalFeature(item.mm_position.offset, item.mm_position.length, str(identifier)))
    lora = None
    if lora_request is not None:
        try:
            lora = adapters.identity(lora_request)
        except AdapterUnreadableError as error:
            return Uncacheable("lora", str(error))
    return RequestIdentity(lora, tuple(features), _salt_digest(salt) if salt else None)


def _salt_digest(salt: str) -> bytes:
    return tagged_digest("kvplug.salt", salt.encode("utf-8", "surrogatepass"))
