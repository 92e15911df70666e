"""What a worker has to know of vLLM's configuration to read what engines with other parallel sizes have stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplug.canonical import plain
from kvplug.errors import ConfigError, UnsupportedError
from kvplug.namespace import Shard, has_draft_kv, own_shard, shards_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["PeerFacts"]

#: Entries of a model's configuration that count KV heads.
_COUNTS_HEADS = re.compile(r"kv_heads|key_value_heads|attention_groups|head_kv|query_group_num|heads_in_group")


@dataclass(frozen=True)
class PeerFacts:
    """What a worker has to know to read what engines with other parallel sizes have stored.

    Attributes:
        own: This rank's share.
        layouts: Tensor- and pipeline-parallel size of each kind of these engines.
        peers: For each of them, the shares of its ranks, or why it can't be read.
        specs: The KV-cache spec of each layer of this rank.
        latent: Whether the model has latent attention, which isn't spread over tensor-parallel ranks.
        doubt: Why none of them can be read, if there is a reason.

    """

    own: Shard
    layouts: tuple[tuple[int, int], ...]
    peers: tuple[tuple[Shard, ...] | str, ...]
    specs: Mapping[str, Any]
    latent: bool = False
    doubt: str | None = None

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, peer_layouts: Sequence[tuple[int, int]]) -> PeerFacts:
        """Collect what vLLM says of this rank, and of those engines' ranks.

        Args:
            vllm_config: vLLM's `VllmConfig` in a worker.
            kv_cache_config: vLLM's `KVCacheConfig` there.
            peer_layouts: Tensor- and pipeline-parallel size of each kind of engine whose values may be read.

        """
        peers = tuple(_shards_or_reason(vllm_config, *sizes) for sizes in peer_layouts)
        own, latent = own_shard(vllm_config), bool(getattr(vllm_config.model_config, "use_mla", False))
        return cls(
            own,
            tuple(peer_layouts),
            peers,
            dict(_specs(kv_cache_config)),
            latent,
            _doubt(vllm_config, own, latent=latent),
        )


def _shards_or_reason(vllm_config: Any, tp_size: int, pp_size: int) -> tuple[Shard, ...] | str:
    try:
        return shards_of(vllm_config, tp_size, pp_size)
    except UnsupportedError as error:
        return str(error)


def _specs(kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        by_layer = getattr(spec, "kv_cache_specs", {})
        for name in group.layer_names:
            yield name, by_layer.get(name, spec)


def _doubt(vllm_config: Any, own: Shard, *, latent: bool) -> str | None:
    """Say why not even this rank's own share can be told for sure, whatever the caches look like."""
    if own.pcp[1] > 1 or own.dcp[1] > 1:
        return "under context parallelism, the tokens of a block are spread over ranks"
    if latent:
        return None
    if has_draft_kv(vllm_config):
        return "the KV heads of the draft model's layers may be spread over ranks in another way"
    if own.tp[1] > 1 and own.heads[1] - own.heads[0] == 1:
        # A rank's one head of a layer may be one of fewer heads than in other layers: it doesn't look any different.
        config = getattr(vllm_config.model_config, "hf_text_config", None)
        try:
            counts = set(_head_counts(plain(config, name="hf_text_config")))
        except ConfigError as error:
            return f"it can't be read how many KV heads layers have ({error})"
        if len(counts) > 1:
            return f"layers may have different numbers of KV heads ({', '.join(map(str, sorted(counts)))})"
    return None


def _head_counts(config: Any, name: str = "") -> Iterator[int]:
    """Yield the numbers of KV heads that a model's configuration names, at any depth."""
    if isinstance(config, dict):
        for key, value in config.items():
            # What is nested in a matching entry counts, too: numbers by layer.
            yield from _head_counts(value, key if _COUNTS_HEADS.search(str(key)) or not name else name)
    elif isinstance(config, list):
        for value in config:
            yield from _head_counts(value, name)
    elif isinstance(config, int) and not isinstance(config, bool) and _COUNTS_HEADS.search(name):
        yield config
