"""type2 with kinds of requests that must be left alone or told apart, and in a pool too small for all."""

from __future__ import annotations

import pytest

from support import engines
from support.driver import Corrupt, Generate, OneByOne, ResetLocal, drive, type2
from support.faulty_tier import FaultyTier, use
from support.llm import compare
from support.models import model_path
from support.reuse import CLOSE, assert_differ, assert_nothing_left, hits, prompt

pytestmark = pytest.mark.engine

BLOCK = 32


def run(script, runner="v1", connector=None, function=drive, **kwargs):
    return engines.run(
        function, runner=runner, timeout=120, model=model_path("llama"), script=script, connector=connector, **kwargs
    )


def test_d1_d4_lora_and_salt(runner):
    """D1, D4: adapters, no adapter, and cache salts don't share KV; the same adapter or salt does.

    A request for log-probabilities of its prompt computes all of it.
    """
    text = prompt(200, seed=11)
    kinds = [{}, {"lora": (1, model_path("lora1"))}, {"lora": (2, model_path("lora2"))}, {"salt": "x"}, {"salt": "y"}]
    asked = [Generate([text], 4, **kind) for kind in kinds]
    full = Generate([text], 3, sampling={"prompt_logprobs": 2})
    args = {"enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False}
    plain = run([*asked, full], **args).rounds
    ours = run([*asked, *asked, full, Corrupt(), asked[0]], runner, type2(), **args)
    cold, warm, logprobs, spoilt = ours.rounds[:5], ours.rounds[5:10], ours.rounds[10], ours.rounds[11]
    for expected, one, other in zip(plain, cold, warm, strict=False):
        compare(one.outputs, expected.outputs, atol=CLOSE)
        compare(other.outputs, expected.outputs, atol=CLOSE)
    assert hits(cold) == [0] * 5
    assert hits(warm) == [192] * 5
    compare(logprobs.outputs, plain[5].outputs, atol=CLOSE)
    assert hits([logprobs]) == [0]
    # The controls: a wrong hit would show.
    assert_differ(plain[1].outputs, plain[0].outputs)
    assert_differ(spoilt.outputs, plain[0].outputs)
    assert_nothing_left(ours)


def test_several_samples_of_a_prompt():
    """With n > 1, samples with the same seed are the same, cold and warm, however many of them load."""
    ask = Generate([prompt(120, 3)], 4, sampling={"n": 3, "temperature": 1.0, "seed": 5})
    (plain,) = run([ask]).rounds
    ours = run([ask, ResetLocal(), ask, Corrupt(), ResetLocal(), ask], connector=type2())
    cold, warm, spoilt = ours.rounds
    compare(cold.outputs, plain.outputs, atol=CLOSE)
    compare(warm.outputs, plain.outputs, atol=CLOSE)
    assert_differ(spoilt.outputs, plain.outputs)
    assert hits([warm])[0] >= 96
    assert_nothing_left(ours)


def test_i10_requests_that_load_dont_keep_each_other_from_starting(runner):
    """I10: two requests with hits in a pool of seven blocks, each of which needs most of it: both finish."""
    texts = [prompt(130, 1), prompt(140, 2)]
    ask = OneByOne(texts, 4)
    (plain,) = run([ask]).rounds
    ours = run(
        [ask, ResetLocal(), Generate(texts, 4), Corrupt(), ResetLocal(), Generate(texts, 4)],
        runner,
        type2(),
        num_gpu_blocks=8,  # one of them is the null block
        max_model_len=192,
    )
    compare(ours.rounds[1].outputs, plain.outputs, atol=CLOSE)
    assert_differ(ours.rounds[2].outputs, plain.outputs)
    assert hits(ours.rounds)[1] > 0
    assert_nothing_left(ours)


def hanging(**arguments):
    """Serve over a tier that hangs; return how long the steps took meanwhile, in seconds."""
    import time

    from support import llm as engine

    use()
    slowest = []

    def hang(llm):
        FaultyTier.going.clear()
        core = llm.llm_engine.engine_core.engine_core
        inner = core.step_fn

        def step():
            start = time.perf_counter()
            result = inner()
            slowest.append(time.perf_counter() - start)
            return result

        core.step_fn = step

    def go(llm):
        FaultyTier.going.set()
        engine.settle(llm)

    script = [step if not isinstance(step, str) else {"hang": hang, "go": go}[step] for step in arguments["script"]]
    return drive(**arguments | {"script": script}), max(slowest)


def test_i12_a_tier_that_hangs_delays_no_step():
    """I12: while lookups hang, steps go on; a request waits for them at most `l2_load_timeout`, and is computed."""
    asks = [Generate([prompt(100, 1), prompt(70, 2)], 4), Generate([prompt(150, 3), prompt(90, 4)], 24)]
    plain = run(asks).rounds
    patience = 3.0  # a step that waited for the tier would take as long
    connector = type2(l2="faulty", l2_load_timeout=patience, l2_timeout=10)
    result, slowest = run(["hang", *asks, "go"], connector=connector, function=hanging)
    for ours, expected in zip(result.rounds, plain, strict=True):
        compare(ours.outputs, expected.outputs, atol=CLOSE)
    assert sum(r.counts["l2_load_timeouts"] for r in result.rounds) > 0
    assert slowest < 0.8 * patience
