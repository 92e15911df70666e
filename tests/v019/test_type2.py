"""type2 on vLLM 0.19.1, an old release: one KV-cache group, on the first model runner.

Run by ``make test-0.19``, in an environment of its own.
"""

from __future__ import annotations

import pytest

from support import engines
from support.driver import Corrupt, Generate, OneByOne, ResetLocal, drive, type2
from support.llm import compare
from support.reuse import assert_differ, assert_nothing_left, hits, prompt

pytestmark = pytest.mark.engine

BLOCK = 32
#: See `test_type1`.
CLOSE = 5e-5


@pytest.mark.parametrize("transfer", ["between_steps", "layerwise"])
def test_hits(models, transfer):
    """Cold, warm and partly shared prompts equal a plain engine's."""
    prompts = [prompt(330, 1), prompt(100, 2), prompt(33, 3), prompt(31, 4)]
    prompts.append(prompts[0][:200] + prompt(90, 5))
    ask = OneByOne(prompts, 6)
    plain = engines.run(drive, timeout=300, model=models("llama"), script=[ask, ask])
    script = [ask, ResetLocal(), ask, Corrupt(), ResetLocal(), ask]
    ours = engines.run(drive, timeout=300, model=models("llama"), script=script, connector=type2(transfer=transfer))
    cold, warm, corrupted = ours.rounds
    compare(cold.outputs, plain.rounds[0].outputs)
    compare(warm.outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert_differ(corrupted.outputs, plain.rounds[0].outputs, atol=CLOSE)
    # The last one finds six blocks in vLLM's own cache, and three in L1.
    assert hits([cold, warm]) == [0, 320 + 96 + 32 + 3 * BLOCK]
    assert_nothing_left(ours)


def test_chunked_concurrent_and_preempted(models):
    """Requests in chunks, more at once than fit, are preempted and resumed: outputs equal those of requests alone."""
    prompts = [prompt(156 + i, 20 + i) for i in range(3)]
    ask = Generate(prompts, 40)
    plain = engines.run(drive, timeout=300, model=models("llama"), script=[OneByOne(prompts, 40)])
    ours = engines.run(
        drive,
        timeout=300,
        model=models("llama"),
        script=[ask, ask, Corrupt(), Generate(prompts, 8)],
        connector=type2(),
        num_gpu_blocks=16,
        max_model_len=256,
        max_num_batched_tokens=100,
        enable_prefix_caching=False,
    )
    cold, warm, corrupted = ours.rounds
    assert ours.preemptions >= 2
    for outputs in (cold.outputs, warm.outputs):
        compare(outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert hits([warm])[0] > 3 * 100
    assert_differ(corrupted.outputs, [output.first(8) for output in plain.rounds[0].outputs], atol=CLOSE)
    assert_nothing_left(ours)
