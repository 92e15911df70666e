"""type2 on real engines: outputs equal those of an engine without a connector, whichever way blocks travel."""

from __future__ import annotations

import random

import pytest

from support import engines
from support.driver import Abort, Corrupt, Generate, OneByOne, ResetAll, ResetLocal, drive, type2
from support.llm import compare
from support.models import model_path
from support.reuse import CLOSE, assert_differ, assert_nothing_left, hits, loaded, prompt

pytestmark = pytest.mark.engine

BLOCK = 32
#: Bytes of a block of the test model: 4 layers, 2 KV heads, 32 values each of K and V, float32.
BLOCK_BYTES = 4 * BLOCK * 2 * (32 + 32) * 4

#: Ways for blocks to travel, by name: settings.
WAYS = {
    "between_steps": {},
    "within_step": {"save_within_step": True},
    "layerwise": {"transfer": "layerwise"},
    "layerwise_within_step": {"transfer": "layerwise", "save_within_step": True},
}
#: Every way on the first runner, the two that differ in what vLLM does on the second one.
RUNS = [*(("v1", way) for way in WAYS), ("v2", "between_steps"), ("v2", "layerwise")]


def run(runner, script, way="between_steps", settings=None, model="llama", **kwargs):
    connector = type2(**WAYS[way], **(settings or {}))
    return engines.run(
        drive, runner=runner, model=model_path(model), script=script, timeout=300, connector=connector, **kwargs
    )


def run_plain(script, model="llama", **kwargs):
    """Run a script on an engine without a connector; on the first runner, with which the second one agrees."""
    key = repr((script, model, sorted(kwargs.items())))
    if key not in _plain:
        _plain[key] = engines.run(drive, model=model_path(model), script=script, timeout=300, **kwargs)
    return _plain[key]


_plain = {}


def promised(length, way):
    """Return the tokens of a stored prompt that are promised: one is left to compute where the step goes on at once."""
    return (length - 1 if "layerwise" in way else length) // BLOCK * BLOCK


@pytest.mark.parametrize(("runner", "way"), RUNS)
def test_hits_of_every_length(runner, way):
    """Cold, full and partial hits of prompts around block boundaries equal a plain engine, and continue vLLM's own.

    B1: a prompt that is stored to its last token still has one token computed.
    """
    # Exactly ten blocks, one token less and more, less than a block, one block, one token.
    lengths = [320, 319, 321, 31, 32, 33, 1]
    prompts = [prompt(n, seed=n) for n in lengths]
    # Shares six blocks with the first, then goes on differently; and differs within the first block.
    prompts += [prompts[0][:200] + prompt(100, seed=7), prompts[0][:10] + prompt(200, seed=8)]
    ask = OneByOne(prompts, 3)
    (plain,) = run_plain([ask]).rounds
    script = [
        *(ask, ResetLocal(), ask, Corrupt(), ResetLocal(), ask),
        *(ResetAll(), ask, ResetLocal(), OneByOne([prompts[0][:130]], 3), OneByOne(prompts[:1], 3)),
    ]
    ours = run(runner, script, way)
    cold, warm, corrupted, again, part, rest = ours.rounds
    for round_ in (cold, warm, again):
        compare(round_.outputs, plain.outputs, atol=CLOSE)
    assert_differ(corrupted.outputs, plain.outputs)
    # What the eighth shares with the first, vLLM's own cache has, warm, too.
    whole = [promised(n, way) for n in lengths] + [(300 // BLOCK - 6) * BLOCK, 210 // BLOCK * BLOCK]
    assert hits([cold, warm, corrupted, again]) == [0, sum(whole), sum(whole), 0]
    assert loaded([cold, warm, corrupted, again]) == [0, sum(whole) // BLOCK, sum(whole) // BLOCK, 0]
    # Four blocks in vLLM's own cache, the rest in L1.
    compare(rest.outputs, plain.outputs[:1], atol=CLOSE)
    assert hits([part, rest]) == [128, promised(320, way) - 128]
    assert_nothing_left(ours)


@pytest.mark.parametrize(("runner", "way"), RUNS)
def test_b13_chunked_prefill(runner, way):
    """Requests side by side in chunks that end inside blocks: all is saved, decoded blocks too, and hits are right.

    C15: the next turn of a conversation starts from the blocks that decoding filled.
    """
    prompts = [prompt(430, seed=2), prompt(250, seed=3), prompt(65, seed=4)]
    ask = Generate(prompts, 8)
    args = {"max_num_batched_tokens": 100}
    (plain,) = run_plain([ask], **args).rounds
    longer = Generate([text + output.tokens + [9, 8] for text, output in zip(prompts, plain.outputs, strict=True)], 4)
    (plain_longer,) = run_plain([longer], **args).rounds
    script = [ask, ResetLocal(), ask, ResetLocal(), longer, Corrupt(), ResetLocal(), ask]
    ours = run(runner, script, way, **args)
    cold, warm, turn, corrupted = ours.rounds
    compare(cold.outputs, plain.outputs, atol=CLOSE)
    compare(warm.outputs, plain.outputs, atol=CLOSE)
    compare(turn.outputs, plain_longer.outputs, atol=CLOSE)
    assert_differ(corrupted.outputs, plain.outputs)
    # Of the eight generated tokens of each, seven were inputs and have KV: the second one fills a block with them.
    whole = [(len(text) + 7) // BLOCK for text in prompts]
    assert cold.counts["blocks_saved"] == sum(whole)
    assert loaded([warm, turn]) == [sum(len(text) // BLOCK for text in prompts), sum(whole)]
    assert_nothing_left(ours)


@pytest.mark.parametrize(("runner", "way"), [("v1", "between_steps"), ("v1", "layerwise"), ("v2", "between_steps")])
def test_many_at_once_with_evictions(runner, way):
    """C13, C14, B6: many requests with shared prefixes over a small L1: what is evicted or refused is a miss."""
    rng = random.Random(4)
    stems = [prompt(n, seed=n) for n in (64, 96, 150)]
    prompts = [rng.choice(stems) + prompt(rng.randrange(1, 90), seed=i) for i in range(24 if runner == "v1" else 8)]
    args = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    ask = Generate(prompts, 4)
    (plain,) = run_plain([ask], **args).rounds
    script = [ask, ResetLocal(), ask, ResetLocal(), Generate(prompts[::-1], 4)]
    ours = run(runner, script, way, {"l1_size_per_rank": 6 * BLOCK_BYTES}, **args)
    first, second, third = ours.rounds
    for outputs in (first.outputs, second.outputs, third.outputs[::-1]):
        compare(outputs, plain.outputs, atol=CLOSE)
    assert sum(r.counts["blocks_evicted"] for r in ours.rounds) > 0
    assert sum(loaded(ours.rounds)) > 0
    assert_nothing_left(ours)


@pytest.mark.parametrize(
    ("runner", "way", "asynchronous"),
    [
        *(("v1", way, False) for way in WAYS),
        *(("v1", "between_steps", True), ("v1", "layerwise", True)),
        *(("v2", "between_steps", False), ("v2", "between_steps", True)),
    ],
)
def test_c2_preemption_and_resume(runner, way, asynchronous):
    """Requests that don't fit are preempted and resumed, loads included, and what was saved of them is right.

    Blocks that are being saved are given to others meanwhile. C6: the scheduler's own object isn't changed: the driver
    checks the tokens in flight at each preemption. C15: with asynchronous scheduling, decoded blocks are stored right.
    """
    # Three prompts of five blocks, and two more each to generate, in a cache of 15 blocks. Without vLLM's own prefix
    # cache a resumed request has only L1 to find its blocks in.
    prompts = [prompt(156 + i, seed=20 + i) for i in range(3)]
    tokens = 40
    (plain,) = run_plain([OneByOne(prompts, tokens)]).rounds
    ask = Generate(prompts, tokens)
    longer = [text + output.tokens[:39] for text, output in zip(prompts, plain.outputs, strict=True)]
    (plain_longer,) = run_plain([OneByOne(longer, 3)]).rounds
    script = [ask, ask, OneByOne(longer, 3), Corrupt(), OneByOne(longer, 3)]
    ours = run(
        runner,
        script,
        way,
        asynchronous=asynchronous,
        num_gpu_blocks=16,
        max_model_len=256,
        max_num_batched_tokens=100,
        enable_prefix_caching=False,
    )
    cold, warm, after, corrupted = ours.rounds
    assert ours.preemptions >= 2
    compare(cold.outputs, plain.outputs, atol=CLOSE)
    compare(warm.outputs, plain.outputs, atol=CLOSE)
    compare(after.outputs, plain_longer.outputs, atol=CLOSE)
    assert_differ(corrupted.outputs, plain_longer.outputs)
    assert loaded([cold])[0] > 0
    # All of the 195 or so tokens but the last block's rest were stored, generated ones included.
    assert hits([after]) == [sum(len(text) // BLOCK * BLOCK for text in longer)]
    assert_nothing_left(ours)


def test_aborted_requests(runner):
    """Requests aborted while they wait, load, prefill and decode leave nothing behind; what they saved is right."""
    texts = [prompt(300, seed=30), prompt(310, seed=31), prompt(90, seed=32)]
    args = {"max_num_batched_tokens": 128}
    (plain,) = run_plain([OneByOne(texts)], **args).rounds
    script = [
        *(Abort(texts, 0), Abort(texts, 1), Abort(texts, 2), Abort(texts, 7)),
        *(step for count in (0, 1, 2, 3, 5) for step in (ResetLocal(), Abort(texts, count))),
        *(ResetLocal(), OneByOne(texts)),
    ]
    ours = run(runner, script, **args)
    compare(ours.rounds[0].outputs, plain.outputs, atol=CLOSE)
    assert loaded(ours.rounds) == [sum(len(text) // BLOCK for text in texts)]
    assert_nothing_left(ours)


def test_d9_reset_cache(runner):
    """reset_prefix_cache(reset_connector=True) makes L1 forget; without it L1 stays warm."""
    ask = OneByOne([prompt(200, seed=9)])
    ours = run(runner, [ask, ResetLocal(), ask, ResetAll(), ask, ResetLocal(), ask])
    assert hits(ours.rounds) == [0, 192, 0, 192]
    for other in ours.rounds[1:]:
        compare(other.outputs, ours.rounds[0].outputs, atol=CLOSE)


@pytest.mark.parametrize(
    ("model", "block_size", "way"),
    [("llama_mha", 64, "between_steps"), ("llama_mqa", 128, "between_steps"), ("llama_mqa", 64, "layerwise")],
)
def test_heads_and_larger_blocks(model, block_size, way):
    """As many KV heads as heads, and one; blocks of 64 and 128 tokens; vLLM's own prefix caching off."""
    prompts = [prompt(140, 1), prompt(260, 2)]
    args = {"model": model, "block_size": block_size, "enable_prefix_caching": False}
    ask = Generate(prompts, 4)
    (plain,) = run_plain([ask], **args).rounds
    ours = run("v1", [ask, ask, Corrupt(), ask], way, **args)
    cold, warm, corrupted = ours.rounds
    compare(cold.outputs, plain.outputs, atol=CLOSE)
    compare(warm.outputs, plain.outputs, atol=CLOSE)
    assert_differ(corrupted.outputs, plain.outputs)
    assert loaded(ours.rounds) == [0, *[140 // block_size + 260 // block_size] * 2]
    assert_nothing_left(ours)
