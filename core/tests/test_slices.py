"""What another engine's rank says of its layout, and which heads are where: compared with that rank's own caches."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peer_engines import LAYOUTS, Model, Rank, key_of

from kvplug.errors import UnsupportedError
from kvplug.namespace import own_shard, shards_of
from kvplug.paged.layout import Layer, read_layer
from kvplug.paged.shares import cut, parts_of
from kvplug.paged.slices import Move, Sliced, find_heads, joined, move

SIZES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_peers_layout_is_what_it_says_itself(layout, groups):
    """Names, layouts and lengths of values are those of the ranks that store them, from one head to all of them."""
    model = Model(layers=4, heads=8, tokens=32, groups=groups)
    ranks = {
        sizes: [Rank(model, layout, sizes, rank, {}) for rank in range(sizes[0] * sizes[1])]
        for sizes in (SIZES if groups == 1 else SIZES[:3])
    }
    for mine in ranks.values():
        for rank in mine:
            sliced = cut(rank.facts, rank.paged, rank.caches, rank.groups)
            for sizes, others in ranks.items():
                parts = parts_of(rank.facts, shards_of(rank.config, *sizes), sliced, "32 tokens; ")
                known = {str(other.shard): other for other in others}
                for part in parts:
                    assert part.layout == f"32 tokens; {known[part.shard].paged.layout}"
                    assert part.payload_bytes == known[part.shard].paged.slot_bytes
                assert {part.shard for part in parts} >= ({str(rank.shard)} & known.keys())
    for rank in [rank for mine in ranks.values() for rank in mine]:
        rank.client.close()


@pytest.mark.parametrize("model", [Model(layers=5), Model(heads=2), Model(latent=True)])
def test_shares_are_those_that_ranks_have_themselves(model):
    """What is derived of another engine's ranks is what each of them says."""
    for tp, pp in [(1, 1), (2, 1), (8, 1), (1, 2), (2, 2), (4, 3)]:
        there = [own_shard(model.vllm_config(tp, pp, rank)) for rank in range(tp * pp)]
        assert list(shards_of(model.vllm_config(2, 1, 1), tp, pp)) == there


class Spec(SimpleNamespace):
    """Stands for vLLM's FullAttentionSpec before it had `num_heads`."""


def spec_of(heads, tokens, width, **more):
    return Spec(num_kv_heads=heads, block_size=tokens, head_size=width, **more)


def sliced_of(tensor, spec, blocks=10):
    layer, _ = read_layer("model.layers.0.attn", tensor, blocks)
    return find_heads(layer, tensor, spec, blocks)


@pytest.mark.parametrize(
    ("shape", "heads", "axis"),
    [
        ((2, 10, 16, 2, 8), 2, 2),
        ((2, 10, 16, 8, 8), 8, 2),
        ((10, 2, 16, 2, 8), 2, 2),
        ((10, 2, 2, 16, 8), 2, 1),
        ((20, 2, 8, 2, 8), 2, 3),
        ((10, 2, 16, 16), 2, 0),
        ((10, 16, 2, 16), 2, 1),
        ((10, 16, 16, 1, 16), 1, None),
        ((10, 2, 16, 16, 8), 16, None),
        ((10, 16, 16, 16), 16, None),
        ((10, 16, 2, 8), 2, None),
        ((10, 16, 16), 2, None),
        ((10, 2, 256), 2, None),
        ((2, 10, 16, 2, 4, 2), 2, None),
    ],
)
def test_only_one_dimension_can_be_the_heads(shape, heads, axis):
    """Two in front are keys and values, not two heads; as many heads as tokens can't be told from them."""
    tensor = torch.zeros(shape, dtype=torch.int16)
    if axis is not None:
        assert sliced_of(tensor, spec_of(heads, 16, 8)).axis == axis
    else:
        with pytest.raises(UnsupportedError, match=r"isn't sure which KV heads are where in layer model\.layers\.0"):
            sliced_of(tensor, spec_of(heads, 16, 8))


def test_values_may_have_another_width():
    """Keys and values of different widths are one content."""
    assert sliced_of(torch.zeros(10, 16, 2, 20), spec_of(2, 16, 12, head_size_v=8)).axis == 1
    with pytest.raises(UnsupportedError):
        sliced_of(torch.zeros(2, 10, 16, 2, 12), spec_of(2, 16, 12, head_size_v=8))


def test_two_blocks_of_one_head_are_no_hint():
    """Where the block dimension itself isn't sure, neither is the place of a single head."""
    tensor = torch.zeros(2, 2, 1, 16, 8).transpose(0, 1)
    layer, _ = read_layer("layer", tensor, 2)
    with pytest.raises(UnsupportedError, match="block dimension"):
        find_heads(layer, tensor, spec_of(1, 16, 8), 2)


def test_heads_are_a_dimension_of_an_array():
    """Rows, and bytes of a head in each, for every place of the heads in memory."""
    layer = Layer("layer", "int16", (2, 16, 4, 8), (0, 2, 1, 3), 2 * 16 * 4 * 8 * 2)
    assert (Sliced(layer, 4, 2, (0, 2, 1, 3)).rows, Sliced(layer, 4, 2, (0, 2, 1, 3)).run) == (2, 16 * 8 * 2)
    one = Sliced(layer, 4, 2, (0, 1, 2, 3))
    assert (one.rows, one.run) == (32, 16)
    assert one.with_heads(1).order == (0, 1, 3)
    assert one.with_heads(8).nbytes == 2 * layer.nbytes
    assert Sliced(layer).with_heads(7) == layer
    assert (Sliced(layer).rows, Sliced(layer).run) == (1, layer.nbytes)


def test_moves_touch_only_their_heads():
    """What isn't named stays; a move of neighbouring layers is one, and copies the same."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 2 * 3 * 4 * 5, dtype=np.uint8)
    moves = [
        Move(60 * n, 30 * n, 3, 5, source_heads=4, target_heads=2, source_first=1, target_first=1, heads=1)
        for n in range(2)
    ]
    (both,) = joined(moves)
    assert both.rows == 6
    assert both.nbytes == sum(one.nbytes for one in moves)
    for some in (moves, [both]):
        target = np.full(60, 7, np.uint8)
        move(some, memoryview(source), memoryview(target))
        assert (target.reshape(2, 3, 2, 5)[:, :, 1] == source.reshape(2, 3, 4, 5)[:, :, 1]).all()
        assert (target.reshape(2, 3, 2, 5)[:, :, 0] == 7).all()
    assert len(joined([moves[0], dataclasses.replace(moves[1], target=31)])) == 2
    assert len(joined([moves[0], dataclasses.replace(moves[1], run=6)])) == 2


def test_a_share_that_isnt_complete_isnt_one():
    """Ranks that don't have all that this one has are refused."""
    rank = Rank(Model(), "CPU", (1, 1), 0, {})
    sliced = cut(rank.facts, rank.paged, rank.caches, rank.groups)
    shards = shards_of(rank.config, 4, 1)
    assert len(parts_of(rank.facts, shards, sliced, "")) == 4
    with pytest.raises(UnsupportedError, match="don't have all"):
        parts_of(rank.facts, shards[1:], sliced, "")
    rank.facts.specs.clear()
    with pytest.raises(UnsupportedError, match="doesn't say what is in layer"):
        cut(rank.facts, rank.paged, rank.caches, rank.groups)
    assert rank.group_of(key_of(1)) == 0
    rank.client.close()
