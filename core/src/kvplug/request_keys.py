"""Block keys of requests, for each of a model's KV-cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplug.identity import RequestIdentity, Uncacheable, identity_of
from kvplug.keys import KeyChain
from kvplug.log import RateLimited, get_logger
from kvplug.lora import AdapterIdentities

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup

__all__ = ["KeyMaker", "RequestKeys", "Tail"]

_limited = RateLimited(get_logger(__name__))


@dataclass(frozen=True)
class Tail:
    """Where some first tokens of a request end: in blocks that are full then, or in ones that aren't."""

    #: How many tokens these are.
    tokens: int
    #: By group, the key of the block that they begin and don't fill; None if they end with a full block.
    keys: tuple[bytes | None, ...]


class RequestKeys:
    """Keys of one request's full blocks, in every group, computed as its tokens come.

    Groups with blocks of the same size share a chain. Where there are several groups, a group's number is the last byte
    of its keys: what layers of one group hold is no use to another's.

    Args:
        namespace: See `KeyChain`.
        groups: The KV-cache groups.
        identity: What, besides the tokens, decides the request's KV.

    """

    def __init__(self, namespace: bytes, groups: Sequence[KVGroup], identity: RequestIdentity) -> None:
        chains: dict[int, KeyChain] = {}
        for group in groups:
            if group.block_size not in chains:
                chains[group.block_size] = KeyChain(namespace, group.block_size, identity)
        self._chains = tuple(chains.values())
        self._of_group = tuple(chains[group.block_size] for group in groups)
        self._has_suffixes = len(groups) > 1
        if len(groups) == 1:
            #: By group, one key per full block, in order. Grows; not to be changed by the caller.
            self.by_group: tuple[list[bytes], ...] = (self._chains[0].keys,)
        else:
            self.by_group = tuple([] for _ in groups)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append keys for the blocks that have become full; see `KeyChain.extend`."""
        for chain in self._chains:
            chain.extend(token_ids)
        if self._has_suffixes:
            for number, (chain, keys) in enumerate(zip(self._of_group, self.by_group, strict=True)):
                suffix = bytes((number,))
                keys.extend(key + suffix for key in chain.keys[len(keys) :])

    def tail(self, token_ids: Sequence[int], stop: int) -> Tail:
        """Return where the first `stop` tokens end; see `KeyChain.tail`."""
        keys: list[bytes | None] = []
        for number, chain in enumerate(self._of_group):
            key = chain.tail(token_ids, stop)
            keys.append(key + bytes((number,)) if key is not None and self._has_suffixes else key)
        return Tail(stop, tuple(keys))


class KeyMaker:
    """Makes the keys of requests, and says, once in a while, why there can't be any.

    Args:
        namespace: Fingerprint of model and cache, 32 bytes (`kvplug.namespace.namespace_fingerprint`).
        groups: The KV-cache groups.

    """

    def __init__(self, namespace: bytes, groups: Sequence[KVGroup]) -> None:
        self._namespace = namespace
        self._groups = tuple(groups)
        self._adapters = AdapterIdentities()

    def start(self, request: Any) -> RequestKeys | None:
        """Return a request's keys, none yet; None if its KV must be neither stored nor reused.

        Args:
            request: vLLM's `Request`.

        """
        identity = identity_of(request, self._adapters)
        if isinstance(identity, Uncacheable):
            _limited.warning(
                ("uncacheable", identity.kind), "A request is neither stored nor reused: %s", identity.reason
            )
            return None
        return RequestKeys(self._namespace, self._groups, identity)

    @staticmethod
    def extend(keys: RequestKeys, request: Any) -> bool:
        """Bring a request's keys up to date with its tokens, and return whether they can be used.

        Args:
            keys: The keys.
            request: vLLM's `Request`.

        """
        try:
            keys.extend(request.all_token_ids)
        except ValueError as error:
            _limited.warning("keys", "A request is neither stored nor reused: %s", error)
            return False
        return True
