"""What a connector has to know of vLLM's KV-cache groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvplug.errors import UnsupportedError

__all__ = ["AttentionGroup", "single_attention_group"]

# Kinds of cache whose blocks hold one KV per token, and nothing that depends on more than the tokens before it.
# By name, since not every release has every class; subclasses of these count too.
_TOKEN_WISE = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
# Subclasses or relatives that depend on something else: an encoder's input, state.
_REFUSED = ("CrossAttentionSpec", "EncoderOnlyAttentionSpec", "MambaSpec")
# Kinds that free blocks while the request runs.
_WINDOWED = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")


@dataclass(frozen=True)
class AttentionGroup:
    """A KV-cache group of attention layers."""

    #: Blocks in the paged cache.
    num_blocks: int
    #: Tokens per block.
    block_size: int
    #: Bytes of one block of each layer, by layer name.
    page_size_bytes: Mapping[str, int]
    #: Whether blocks are freed, and replaced by the null block, while their request still runs.
    windowed: bool


def single_attention_group(kv_cache_config: Any, connector: str) -> AttentionGroup:
    """Return the one group of a model whose layers all keep one KV per token.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig`.
        connector: The connector's name, for messages.

    Raises:
        UnsupportedError: There are several groups, or the group holds something else (Mamba state, cross attention).

    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedError(
            f"{connector} supports models with one KV-cache group so far, and this one has {len(groups)}: leave out "
            "--no-disable-hybrid-kv-cache-manager, or serve this model without the connector."
        )
    group = groups[0]
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
    for layer, layer_spec in specs.items():
        kinds = {cls.__name__ for cls in type(layer_spec).__mro__}
        if not kinds.intersection(_TOKEN_WISE) or kinds.intersection(_REFUSED):
            raise UnsupportedError(
                f"{connector} can't store the cache of layer {layer} ({type(layer_spec).__name__}), which isn't one KV "
                "per token: serve this model without the connector."
            )
    return AttentionGroup(
        num_blocks=kv_cache_config.num_blocks,
        block_size=spec.block_size,
        page_size_bytes={layer: layer_spec.page_size_bytes for layer, layer_spec in specs.items()},
        windowed=any(cls.__name__ in _WINDOWED for layer_spec in specs.values() for cls in type(layer_spec).__mro__),
    )
