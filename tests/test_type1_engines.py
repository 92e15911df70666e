"""type1 on real engines, on both model runners: outputs equal those of an engine without a connector."""

from __future__ import annotations

import random

import pytest

from support import engines
from support.driver import Abort, Corrupt, Generate, OneByOne, ResetAll, ResetLocal, drive, type1
from support.llm import compare

pytestmark = pytest.mark.engine

BLOCK = 32
#: Where a hit changes how a prompt is split into steps, sums run in another order.
CLOSE = 1e-5


def prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def run(runner, script, **kwargs):
    return engines.run(drive, runner=runner, script=script, timeout=300, **kwargs)


def run_plain(script, **kwargs):
    """Run a script on an engine without a connector.

    Always on the first runner: without a connector the two agree closely enough (see test_harness), and it is faster.
    """
    key = repr((script, sorted(kwargs.items())))
    if key not in _plain:
        _plain[key] = run("v1", script, **kwargs)
    return _plain[key]


_plain = {}


def assert_differ(one, other, atol):
    """The negative control: the comparison that passed must fail here."""
    with pytest.raises(AssertionError, match="request"):
        compare(one, other, atol=atol)


def assert_nothing_left(result):
    assert result.leftovers
    assert not any(result.leftovers.values()), result.leftovers


def test_hits_of_every_length(runner, models):
    """Cold, full and partial hits of prompts around block boundaries, one step each, equal a plain engine.

    B1: a prompt that is stored to its last token still has one token computed.
    """
    # Exactly ten blocks, one token less and more, less than a block, one block, one token.
    lengths = [320, 319, 321, 31, 32, 33, 1]
    prompts = [prompt(n, seed=n) for n in lengths]
    # Shares six blocks with the first, then goes on differently; and differs within the first block.
    prompts += [prompts[0][:200] + prompt(100, seed=7), prompts[0][:10] + prompt(200, seed=8)]
    plain = run_plain([OneByOne(prompts, 3)], model=models("llama"))
    ask = OneByOne(prompts, 3)
    script = [ask, ResetLocal(), ask, Corrupt(), ResetLocal(), ask]
    ours = run(runner, script, model=models("llama"), connector=type1())
    cold, warm, corrupted = ours.rounds
    compare(cold.outputs, plain.rounds[0].outputs, atol=CLOSE)
    compare(warm.outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert_differ(corrupted.outputs, plain.rounds[0].outputs, CLOSE)
    # What the eighth shares with the first, vLLM's own cache has.
    assert cold.counts["tokens_loaded"] == 0
    whole = [n // BLOCK * BLOCK for n in (320, 319, 321, 31, 32, 33, 1)]
    # Warm, too: the eighth's first six blocks are in vLLM's own cache by then.
    assert warm.counts["tokens_loaded"] == sum(whole) + (300 // BLOCK - 6) * BLOCK + 210 // BLOCK * BLOCK
    # One token is computed again where the whole prompt is stored: 320 and 32.
    assert warm.counts["tokens_skipped"] == warm.counts["tokens_loaded"] - 2
    assert_nothing_left(ours)


def test_hits_that_continue_vllms_own(runner, models):
    """A prefix in vLLM's own cache and the rest in L1: the hit starts where vLLM's ends."""
    text = prompt(330, seed=1)
    plain = run_plain([OneByOne([text])], model=models("llama"))
    script = [OneByOne([text]), ResetLocal(), OneByOne([text[:130]]), OneByOne([text])]
    ours = run(runner, script, model=models("llama"), connector=type1())
    compare(ours.rounds[2].outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert ours.rounds[1].counts["tokens_loaded"] == 128
    assert ours.rounds[2].counts["tokens_loaded"] == 320 - 128


def test_b13_chunked_prefill(runner, models):
    """Chunks that end inside blocks: everything is saved, and later chunks are shortened too.

    On the second runner this needs its device-side count: without it the request never finishes.
    """
    prompts = [prompt(430, seed=2), prompt(250, seed=3)]
    args = {"model": models("llama"), "max_num_batched_tokens": 100}
    plain = run_plain([Generate(prompts)], **args)
    script = [Generate(prompts), ResetLocal(), Generate(prompts), Corrupt(), ResetLocal(), Generate(prompts)]
    ours = run(runner, script, connector=type1(), **args)
    cold, warm, corrupted = ours.rounds
    compare(cold.outputs, plain.rounds[0].outputs, atol=CLOSE)
    compare(warm.outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert_differ(corrupted.outputs, plain.rounds[0].outputs, CLOSE)
    # Of the eight generated tokens of each, seven were inputs and have KV.
    assert cold.counts["blocks_saved"] == (430 + 7) // BLOCK + (250 + 7) // BLOCK
    # A chunk of 100 ends inside a block, which the next chunk loads whole.
    assert warm.counts["tokens_loaded"] > 430
    assert_nothing_left(ours)


def test_many_at_once_with_evictions(runner, models):
    """C13, B6: many requests with shared prefixes over an L1 of a few blocks: evicted and refused blocks are misses."""
    rng = random.Random(4)
    stems = [prompt(n, seed=n) for n in (64, 96, 150)]
    prompts = [rng.choice(stems) + prompt(rng.randrange(1, 90), seed=i) for i in range(24 if runner == "v1" else 10)]
    args = {"model": models("llama"), "max_num_batched_tokens": 256, "max_num_seqs": 8}
    plain = run_plain([Generate(prompts, 4)], **args)
    block_bytes = 4 * 2 * 2 * 32 * BLOCK * 4  # layers, K and V, heads, head size, tokens, float32
    small = type1(l1_size_per_rank=block_bytes * 6)
    script = [Generate(prompts, 4), ResetLocal(), Generate(prompts, 4), ResetLocal(), Generate(prompts[::-1], 4)]
    ours = run(runner, script, connector=small, **args)
    for outputs in (ours.rounds[0].outputs, ours.rounds[1].outputs, ours.rounds[2].outputs[::-1]):
        compare(outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert sum(r.counts["blocks_evicted"] for r in ours.rounds) > 0
    assert sum(r.counts["tokens_loaded"] for r in ours.rounds) > 0
    assert_nothing_left(ours)


def test_c2_preemption_and_resume(runner, models):
    """Requests that don't fit are preempted and resumed, loads included, and what was saved of them is right.

    C6, and the scheduler's own object isn't changed: the driver checks the tokens in flight at each preemption.
    """
    # Three prompts of five blocks, and two more each to generate, in a cache of 15 blocks. Without vLLM's own prefix
    # cache a resumed request has only L1 to find its blocks in.
    prompts = [prompt(156 + i, seed=20 + i) for i in range(3)]
    tokens = 40
    plain = run_plain([OneByOne(prompts, tokens)], model=models("llama"))
    ask = Generate(prompts, tokens)
    ours = run(
        runner,
        [ask, ask, Corrupt(), Generate(prompts, 8)],
        model=models("llama"),
        connector=type1(),
        num_gpu_blocks=16,
        max_model_len=256,
        enable_prefix_caching=False,
    )
    cold, warm, corrupted = ours.rounds
    assert ours.preemptions >= 2
    compare(cold.outputs, plain.rounds[0].outputs, atol=CLOSE)
    compare(warm.outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert_differ(corrupted.outputs, [o.first(8) for o in plain.rounds[0].outputs], CLOSE)
    assert cold.counts["tokens_loaded"] > 0
    assert_nothing_left(ours)


def test_decoded_tokens_are_reused(runner, models):
    """C15: the next turn of a conversation starts from the blocks that decoding filled."""
    first = prompt(100, seed=5)
    answer = run_plain([OneByOne([first], 60)], model=models("llama")).rounds[0].outputs[0].tokens
    second = first + answer + prompt(20, seed=6)
    plain = run_plain([OneByOne([second])], model=models("llama"))
    ours = run(
        runner, [OneByOne([first], 60), ResetLocal(), OneByOne([second])], model=models("llama"), connector=type1()
    )
    compare(ours.rounds[1].outputs, plain.rounds[0].outputs, atol=CLOSE)
    # The last generated token was never an input: of 160 tokens, KV of 159 exists.
    assert ours.rounds[1].counts["tokens_loaded"] == 159 // BLOCK * BLOCK


def test_d9_reset_cache(runner, models):
    """reset_prefix_cache(reset_connector=True) makes L1 forget; without it L1 stays warm."""
    text = prompt(200, seed=9)
    script = [
        OneByOne([text]),
        ResetLocal(),
        OneByOne([text]),
        ResetAll(),
        OneByOne([text]),
        ResetLocal(),
        OneByOne([text]),
    ]
    ours = run(runner, script, model=models("llama"), connector=type1())
    assert [r.counts["tokens_loaded"] for r in ours.rounds] == [0, 192, 0, 192]
    for other in ours.rounds[1:]:
        compare(other.outputs, ours.rounds[0].outputs, atol=CLOSE)


def test_aborted_requests(runner, models):
    """Requests aborted before, during and after their prefill leave nothing behind; what they saved is right."""
    texts = [prompt(300, seed=30), prompt(310, seed=31), prompt(90, seed=32)]
    plain = run_plain([OneByOne(texts)], model=models("llama"), max_num_batched_tokens=128)
    script = [Abort(texts, 0), Abort(texts, 1), Abort(texts, 2), Abort(texts, 7), ResetLocal(), OneByOne(texts)]
    ours = run(runner, script, model=models("llama"), max_num_batched_tokens=128, connector=type1())
    compare(ours.rounds[0].outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert ours.rounds[0].counts["tokens_loaded"] > 0
    assert_nothing_left(ours)


def test_d1_d4_lora_and_salt(runner, models):
    """D1, D4: adapters, no adapter, and cache salts don't share KV; the same adapter or salt does."""
    text = prompt(200, seed=11)
    one, two = (1, models("lora1")), (2, models("lora2"))
    kinds = [{}, {"lora": one}, {"lora": two}, {"salt": "x"}, {"salt": "y"}]
    args = {"model": models("llama"), "enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False}
    plain = run_plain([Generate([text], 4, **kind) for kind in kinds], **args)
    ours = run(runner, [Generate([text], 4, **kind) for kind in [*kinds, *kinds]], connector=type1(), **args)
    for number, (expected, cold, warm) in enumerate(
        zip(plain.rounds, ours.rounds[: len(kinds)], ours.rounds[len(kinds) :], strict=True)
    ):
        compare(cold.outputs, expected.outputs, atol=CLOSE)
        compare(warm.outputs, expected.outputs, atol=CLOSE)
        assert cold.counts["tokens_loaded"] == 0, kinds[number]
        assert warm.counts["tokens_loaded"] == 192, kinds[number]
    # The control: adapters make a difference that a wrong hit would show.
    assert_differ(plain.rounds[1].outputs, plain.rounds[0].outputs, CLOSE)
    assert_differ(plain.rounds[2].outputs, plain.rounds[1].outputs, CLOSE)


def test_sliding_window(runner, models):
    """A model with a sliding window frees blocks as it goes: null blocks are neither read nor written."""
    prompts = [prompt(347, seed=12), prompt(200, seed=13)]  # generating fills the first one's eleventh block
    args = {"model": models("mistral_sliding"), "max_num_batched_tokens": 150}
    plain = run_plain([OneByOne(prompts)], **args)
    script = [
        *(OneByOne(prompts), ResetLocal(), OneByOne(prompts)),
        *(OneByOne([prompts[0][:200]]), OneByOne(prompts)),  # with null blocks in vLLM's own hit
        *(Corrupt(), ResetLocal(), OneByOne(prompts)),
    ]
    ours = run(runner, script, connector=type1(), **args)
    for number in (0, 1, 3):
        compare(ours.rounds[number].outputs, plain.rounds[0].outputs, atol=CLOSE)
    # Chunks of 150: each loads its whole blocks, the next one starts inside a block.
    assert ours.rounds[1].counts["tokens_loaded"] == (128 + (288 - 150) + (320 - 300)) + (128 + (192 - 150))
    assert_differ(ours.rounds[4].outputs, plain.rounds[0].outputs, CLOSE)
    assert_nothing_left(ours)


def test_prompt_logprobs_are_computed(runner, models):
    """A request for prompt log-probabilities needs every position: it is left alone, and equals a plain engine's."""
    text = prompt(100, seed=14)
    wanted = Generate([text], sampling={"prompt_logprobs": 1})
    plain = run_plain([wanted], model=models("llama"))
    ours = run(runner, [Generate([text]), ResetLocal(), wanted], model=models("llama"), connector=type1())
    compare(ours.rounds[1].outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert ours.rounds[1].counts["tokens_loaded"] == 0
