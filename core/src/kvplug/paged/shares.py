"""Which values of an engine with other parallel sizes hold one rank's share of a block, and where in them it is."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvplug.errors import UnsupportedError
from kvplug.paged.cache import describe
from kvplug.paged.slices import Move, Sliced, find_heads, is_latent, joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvplug.kv_groups import KVGroup
    from kvplug.namespace import Shard
    from kvplug.paged.facts import PeerFacts
    from kvplug.paged.groups import PagedGroups
    from kvplug.paged.layout import Layer

__all__ = ["Part", "cut", "parts_of"]


@dataclass(frozen=True)
class Part:
    """A value of another engine that has something of this rank's share of a block.

    Attributes:
        shard: Whose value it is, as part of its name.
        layout: How it is laid out, as that rank says it.
        payload_bytes: Its length.
        moves: For each KV-cache group, what to copy from the value to this rank's slot.

    """

    shard: str
    layout: str
    payload_bytes: int
    moves: tuple[tuple[Move, ...], ...]


def cut(
    facts: PeerFacts, paged: PagedGroups, kv_caches: Mapping[str, torch.Tensor], groups: Sequence[KVGroup]
) -> tuple[tuple[Sliced, ...], ...]:
    """Return the layers of each KV-cache group of this rank, with their KV heads.

    Raises:
        UnsupportedError: It isn't sure which KV heads are where.

    """
    if facts.doubt is not None:
        raise UnsupportedError(facts.doubt)
    if any(group.kind == "state" for group in groups):
        raise UnsupportedError("recurrent state can't be cut along KV heads")
    heads = facts.own.heads[1] - facts.own.heads[0]
    found = []
    for cache in paged.caches:
        layers = []
        for layer in cache.layers:
            spec = facts.specs.get(layer.name)
            if spec is None:
                raise UnsupportedError(f"vLLM doesn't say what is in layer {layer.name}")
            if is_latent(spec) is not facts.latent or (not facts.latent and spec.num_kv_heads != heads):
                raise UnsupportedError(
                    f"layer {layer.name} ({type(spec).__name__}, {spec.num_kv_heads} KV heads) is unlike the model's "
                    f"others, of which this rank has {heads} KV heads"
                )
            layers.append(find_heads(layer, kv_caches[layer.name], spec, cache.num_blocks))
        found.append(tuple(layers))
    return tuple(found)


def parts_of(
    facts: PeerFacts, peer: Sequence[Shard], groups: Sequence[Sequence[Sliced]], sizes: str
) -> tuple[Part, ...]:
    """Return the values of another engine that have this rank's share of a block, each with what to copy of it.

    Args:
        facts: What is known of this rank.
        peer: The shares of that engine's ranks.
        groups: What `cut` returned.
        sizes: What the text of a layout begins with, before it says how blocks are laid out.

    Raises:
        UnsupportedError: It isn't known what that engine's ranks have, or that isn't all.

    """
    own = facts.own
    parts = []
    for shard in _needed(own, peer):
        stage = _stage(own, shard, groups)
        if not any(stage):
            continue  # layers without KV
        if not all(stage):
            raise UnsupportedError(f"its stage {shard.pp[0]} has no layer of one of the KV-cache groups")
        theirs = [[one.with_heads(shard.heads[1] - shard.heads[0]) for one in layers] for layers in stage]
        part = Part(
            shard=str(shard),
            layout=sizes + " | ".join(describe(layers) for layers in theirs),
            payload_bytes=max(sum(layer.nbytes for layer in layers) for layers in theirs),
            moves=tuple(
                _moves(own, shard, layers, targets, sliced)
                for layers, targets, sliced in zip(theirs, groups, stage, strict=True)
            ),
        )
        if any(part.moves):
            parts.append(part)
    for number, layers in enumerate(groups):
        if sum(one.nbytes for part in parts for one in part.moves[number]) != sum(one.layer.nbytes for one in layers):
            raise UnsupportedError("its ranks don't have all that this rank has")
    return tuple(parts)


def _needed(own: Shard, peer: Sequence[Shard]) -> list[Shard]:
    """Return whose values together have this rank's share: of ranks that have the same, the first."""
    chosen: list[Shard] = []
    for shard in peer:
        known = any((shard.layers, shard.heads) == (other.layers, other.heads) for other in chosen)
        if not known and _common(own.layers, shard.layers) and _common(own.heads, shard.heads):
            chosen.append(shard)
    return chosen


def _common(one: tuple[int, int], other: tuple[int, int]) -> range:
    return range(max(one[0], other[0]), min(one[1], other[1]))


def _stage(own: Shard, shard: Shard, groups: Sequence[Sequence[Sliced]]) -> list[list[Sliced]]:
    """Return the layers that another engine's rank has, group by group, each with as many heads as here."""
    if shard.layers == own.layers:
        return [list(layers) for layers in groups]
    numbers = [[_number(one.layer.name) for one in layers] for layers in groups]
    if not all(number in range(*own.layers) for of_group in numbers for number in of_group):
        raise UnsupportedError("which stage has the layers beyond the model's own isn't known")
    if own.layers[0] <= shard.layers[0] and shard.layers[1] <= own.layers[1]:
        return [
            [one for one, number in zip(layers, of_group, strict=True) if number in range(*shard.layers)]
            for layers, of_group in zip(groups, numbers, strict=True)
        ]
    # It has layers that aren't here. They are known if they are like those that are.
    layers = groups[0]
    patterns = {_pattern(one.layer.name) for one in layers}
    alike = {(one.layer.layout, one.heads, one.axis, one.order) for one in layers}
    if len(groups) > 1 or numbers[0] != list(range(*own.layers)) or len(patterns) > 1 or len(alike) > 1:
        raise UnsupportedError("its stages have layers that this rank hasn't, and not all layers are alike")
    before, after = patterns.pop()
    return [
        [
            replace(layers[0], layer=replace(layers[0].layer, name=f"{before}{number}{after}"))
            for number in range(*shard.layers)
        ]
    ]


def _pattern(name: str) -> tuple[str, str]:
    """Return what is before and behind a layer's number in its name."""
    found = list(re.finditer(r"(?<![^.])\d+(?![^.])", name))
    if len(found) != 1:
        raise UnsupportedError(f"the name {name} doesn't tell which of the model's layers that is")
    return name[: found[0].start()], name[found[0].end() :]


def _number(name: str) -> int:
    before, after = _pattern(name)
    return int(name[len(before) : len(name) - len(after)])


def _moves(
    own: Shard, shard: Shard, theirs: Sequence[Layer], ours: Sequence[Sliced], stage: Sequence[Sliced]
) -> tuple[Move, ...]:
    """Return what to copy of one group's layers."""
    targets, end = {}, 0
    for one in ours:
        targets[one.layer.name] = end
        end += one.layer.nbytes
    moves, source = [], 0
    common = _common(own.heads, shard.heads)
    for layer, one in zip(theirs, stage, strict=True):
        target = targets.get(layer.name)
        if target is not None and one.axis is None:
            moves.append(Move(source, target, 1, layer.nbytes))
        elif target is not None:
            moves.append(
                Move(
                    source,
                    target,
                    one.rows,
                    one.run,
                    source_heads=shard.heads[1] - shard.heads[0],
                    target_heads=one.heads,
                    source_first=common.start - shard.heads[0],
                    target_first=common.start - own.heads[0],
                    heads=len(common),
                )
            )
        source += layer.nbytes
    return joined(moves)
