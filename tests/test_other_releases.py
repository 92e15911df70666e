"""type1 on real engines of other releases, on both model runners: the hook runs there, and outputs stay the same."""

from __future__ import annotations

import random

import pytest

from support import engines
from support.driver import Corrupt, Generate, OneByOne, drive, type1
from support.llm import compare
from support.overlays import OVERLAID

pytestmark = [pytest.mark.engine, pytest.mark.install]

#: Where a hit changes how a prompt is split into steps, sums run in another order.
CLOSE = 1e-5
TOKENS = 40


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


#: Five blocks each, and two more to generate.
PROMPTS = [prompt(156 + number, seed=20 + number) for number in range(3)]


@pytest.fixture(scope="module", params=OVERLAID)
def release(request):
    """A release, whose processes end with its tests."""
    yield request.param
    engines.stop_release(request.param)


@pytest.fixture(scope="module")
def plain(release, models):
    """What an engine of the release generates without a connector."""
    script = [OneByOne(PROMPTS, TOKENS)]
    return engines.run(drive, release=release, model=models("llama"), script=script, timeout=300).rounds[0].outputs


def test_cold_warm_and_preempted(release, runner, models, plain):
    """In a cache of 15 blocks requests are preempted, and with 100 tokens a step they are prefilled in chunks.

    Without vLLM's own prefix cache, whatever isn't computed again comes from L1.
    """
    ask = Generate(PROMPTS, TOKENS)
    ours = engines.run(
        drive,
        runner=runner,
        release=release,
        timeout=300,
        model=models("llama"),
        connector=type1(),
        script=[ask, ask, Corrupt(), Generate(PROMPTS, 8)],
        num_gpu_blocks=16,
        max_model_len=256,
        max_num_batched_tokens=100,
        enable_prefix_caching=False,
    )
    cold, warm, corrupted = ours.rounds
    assert ours.preemptions >= 2
    compare(cold.outputs, plain, atol=CLOSE)
    compare(warm.outputs, plain, atol=CLOSE)
    with pytest.raises(AssertionError, match="request"):
        compare(corrupted.outputs, [output.first(8) for output in plain], atol=CLOSE)
    assert cold.counts["tokens_loaded"] > 0
    assert warm.counts["tokens_skipped"] > 3 * 128
    assert not any(ours.leftovers.values()), ours.leftovers
