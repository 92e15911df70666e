"""What a connector has to know of vLLM's KV-cache groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

from kvplug.errors import UnsupportedError

__all__ = ["KVGroup", "alignment_of", "kv_groups"]

# Kinds of cache whose blocks hold one KV per token, and nothing that depends on more than the tokens before it.
# By name, since not every release has every class; subclasses of these count too.
_TOKEN_WISE = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
# Subclasses or relatives that depend on something else: an encoder's input, state.
_REFUSED = ("CrossAttentionSpec", "EncoderOnlyAttentionSpec", "MambaSpec")
# Of full attention, those whose blocks are all kept.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec", "SinkFullAttentionSpec")


@dataclass(frozen=True)
class KVGroup:
    """One of a model's KV-cache groups: layers whose blocks are given out, and freed, together.

    Attributes:
        index: Its position among the groups, and in block tables.
        kind: `full`: every block is needed. `window`: only the last `window` tokens are; blocks behind them are freed
            while their request runs. `chunk`: likewise, from the last multiple of `window` on. `state`: a block holds
            recurrent state at its end, and only the last one is needed.
        block_size: Tokens per block.
        window: Tokens; 0 where it means nothing.
        every_block: For `state`: whether each block of a step gets the state at its end (vLLM's mode `all`), or only
            one at which a step ends (`align`).
        page_size_bytes: Bytes of one block of each layer, paddings included, by layer name.

    """

    index: int
    kind: Literal["full", "window", "chunk", "state"]
    block_size: int
    window: int
    every_block: bool
    page_size_bytes: Mapping[str, int]

    def first_needed(self, num_tokens: int) -> int:
        """Return the first block that is needed to go on after so many tokens.

        Blocks before it are null blocks in a request that starts there.
        """
        match self.kind:
            case "full":
                return 0
            case "window":
                return max(0, num_tokens - self.window + 1) // self.block_size
            case "chunk":
                return num_tokens // self.window * self.window // self.block_size
            case "state":
                return max(0, num_tokens - 1) // self.block_size


def kv_groups(kv_cache_config: Any, connector: str) -> tuple[KVGroup, ...]:
    """Return what can be in a store of a model's KV-cache groups.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig`.
        connector: The connector's name, for messages.

    Raises:
        UnsupportedError: A layer's cache is of a kind that isn't known, or depends on more than the tokens before it.

    """
    return tuple(_kv_group(index, group, connector) for index, group in enumerate(kv_cache_config.kv_cache_groups))


def alignment_of(groups: tuple[KVGroup, ...]) -> int:
    """Return the tokens at whose multiples all groups have whole blocks."""
    return lcm(*(group.block_size for group in groups))


def _kv_group(index: int, group: Any, connector: str) -> KVGroup:
    specs = dict(_layer_specs(group))
    kinds = {layer: _kind(spec) for layer, spec in specs.items()}
    for layer, kind in kinds.items():
        if kind is None:
            raise UnsupportedError(
                f"{connector} can't store the cache of layer {layer} ({type(specs[layer]).__name__}), which isn't "
                "decided by the tokens before it, or isn't known: serve this model without the connector."
            )
    described = {(kind, _window(spec, kind)) for kind, spec in zip(kinds.values(), specs.values(), strict=True)}
    if len(described) != 1:
        raise UnsupportedError(
            f"{connector} can't store a KV-cache group of unlike layers ({', '.join(sorted(specs))}): serve this model "
            "without the connector."
        )
    kind, window = described.pop()
    first = next(iter(specs.values()))
    return KVGroup(
        index=index,
        kind=kind,  # type: ignore[arg-type]
        block_size=group.kv_cache_spec.block_size,
        window=window,
        every_block=getattr(first, "mamba_cache_mode", "") == "all",
        page_size_bytes={layer: spec.page_size_bytes for layer, spec in specs.items()},
    )


def _layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield each layer's spec. In the scheduler, vLLM has one representative for all layers of a group."""
    spec = group.kv_cache_spec
    by_layer = getattr(spec, "kv_cache_specs", {})
    for layer in group.layer_names:
        yield layer, by_layer.get(layer, spec)


def _kind(spec: Any) -> str | None:
    names = {cls.__name__ for cls in type(spec).__mro__}
    if "MambaSpec" in names:
        return "state"
    if names.intersection(_REFUSED) or not names.intersection(_TOKEN_WISE):
        return None
    if "SlidingWindowSpec" in names:
        return "window"
    if "ChunkedLocalAttentionSpec" in names:
        return "chunk"
    # Anything between full attention and it may keep other blocks than all.
    return "full" if type(spec).__name__ in _FULL else None


def _window(spec: Any, kind: str | None) -> int:
    if kind == "window":
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if kind == "chunk" else 0
