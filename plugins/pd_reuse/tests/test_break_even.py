"""From how many tokens on prompts are loaded, measured at start."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tiers import DictTier

from kvplug.paged.groups import PagedGroups
from kvplug.store import Slab
from kvplug_pd_reuse import break_even as module
from kvplug_pd_reuse.break_even import MAX_TOKENS, Line, break_even, compute_seconds_per_token, measured, tier_seconds
from support.scheduled_steps import BLOCK, groups

CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def config(*, tensor_parallel=1, **entries):
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**(CONFIG | entries)), dtype=torch.float32),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel),
    )


def paged(blocks=16):
    caches = {"layer.0": torch.rand(blocks, 2, BLOCK, 2)}
    of = groups()
    page = {"layer.0": caches["layer.0"][0].nbytes}
    of = tuple(type(group)(0, group.kind, group.block_size, 0, False, page) for group in of)
    return caches, PagedGroups.from_kv_caches(caches, of, num_blocks=blocks), of


@pytest.mark.parametrize(
    ("fixed", "each", "compute", "tokens"),
    [
        (0.010, 0.0, 0.001, 11),  # ten tokens are computed in the time of a lookup
        (0.010, 0.008, 0.001, 21),  # half of what is gained by 16 tokens goes into loading their block
        (0.0, 0.0, 0.001, 1),
        (0.010, 1.0, 0.001, MAX_TOKENS),  # loading is slower
        (10.0, 0.0, 0.001, MAX_TOKENS),
        (0.010, 0.0, 0.0, MAX_TOKENS),
    ],
)
def test_where_both_take_the_same(fixed, each, compute, tokens):
    """Fixed costs over the gain per token, within bounds."""
    assert break_even(Line(fixed, each), 1 / 16, compute) == tokens


def test_the_estimate_goes_by_the_models_weights():
    """Twice the layers take twice as long, half of them on each of two ranks, and of experts those that are used."""
    one = config()
    weights = module._weights_per_token
    base = weights(one.model_config.hf_text_config)
    assert base == 2 * (64 * 16 * 16 + 3 * 64 * 128)
    assert weights(config(num_hidden_layers=4).model_config.hf_text_config) == 2 * base
    few = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
    assert weights(config(**few).model_config.hf_text_config) == 2 * (64 * 16 * 16 + 2 * 3 * 64 * 128)
    assert weights(SimpleNamespace()) is None
    assert compute_seconds_per_token(one, torch.device("cpu")) > 0


def opened(tier):
    tier.open(max_value_bytes=1 << 20, timeout=1.0)
    return tier


class SlowTier(DictTier):
    """Takes its time for each value."""

    def get(self, keys, buffers, timeout):
        time.sleep(0.002 + 0.001 * len(keys))
        return super().get(keys, buffers, timeout)


def test_a_tier_is_measured_and_left_as_it_was():
    """The fixed part and the part per value are told apart, and no value stays."""
    tier = opened(SlowTier())
    fixed, each = tier_seconds(tier, 1000, 8)
    assert 0.0005 < each < 0.02
    assert fixed > 0.0005
    assert not tier.values


def test_a_tier_that_loses_values_is_not_measured():
    """A tier that is full tells nothing."""

    class Full(DictTier):
        def put(self, keys, values, timeout):
            return [False] * len(keys)

    assert tier_seconds(opened(Full()), 1000, 8) is None


def test_measuring_changes_nothing_in_the_paged_cache():
    """What is there stays, and the number is one that can be used."""
    caches, cache, of = paged()
    before = caches["layer.0"].clone()
    slab = Slab(16, cache.slot_bytes, header_bytes=64, pin=False, background=False)
    try:
        tokens = measured(config(), cache, slab, [opened(DictTier())], of)
        assert 1 <= tokens <= MAX_TOKENS
        assert torch.equal(caches["layer.0"], before)
        assert measured(config(), cache, slab, [], of) is None
    finally:
        slab.close()


def test_a_store_that_hangs_doesn_t_hold_the_start(monkeypatch):
    """Measuring ends in time, and without a figure nothing is too short to be loaded."""
    gate = threading.Event()

    class Hung(DictTier):
        def put(self, keys, values, timeout):
            gate.wait(20)
            return super().put(keys, values, timeout)

    monkeypatch.setattr(module, "_TIER_SECONDS", 0.1)
    _, cache, of = paged()
    slab = Slab(16, cache.slot_bytes, header_bytes=64, pin=False, background=False)
    try:
        start = time.monotonic()
        assert measured(config(), cache, slab, [opened(Hung())], of) is None
        assert time.monotonic() - start < 10
    finally:
        gate.set()
        slab.close()
