"""type1 with models whose layers are of two kinds: sliding and full attention, in several KV-cache groups."""

from __future__ import annotations

import random

import pytest

from support import engines
from support import llm as engine
from support.driver import Corrupt, Generate, OneByOne, ResetLocal, drive, type1
from support.llm import compare

pytestmark = pytest.mark.engine

BLOCK = 32
CLOSE = 1e-5


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


#: Two prompts beyond the window of 64 tokens, the second one in chunks; then one that shares its start, and no more.
LONG = prompt(333, 31)
ASK = OneByOne([prompt(210, 30), LONG], 4)
SHARED = OneByOne([[*LONG[:200], *prompt(60, 32)]], 4)
IN_CHUNKS = {"max_num_batched_tokens": 256}


def has_groups(llm):
    """Demand several KV-cache groups, and vLLM's hybrid manager behind them."""
    assert len(engine.scheduler(llm).kv_cache_config.kv_cache_groups) > 1


def serve(*, script, **arguments):
    """Take an engine with several KV-cache groups through a script."""
    return drive(script=[has_groups, *script], **arguments)


_plain = {}


@pytest.fixture
def plain(models):
    """Return what an engine without a connector answers to `ASK` and `SHARED`, by model."""

    def answers(model):
        if model not in _plain:
            rounds = engines.run(serve, model=models(model), script=[ASK, SHARED], **IN_CHUNKS).rounds
            _plain[model] = [r.outputs for r in rounds]
        return _plain[model]

    return answers


@pytest.mark.parametrize(
    ("model", "kind"), [("gemma3", "v1"), ("gemma3", "v2"), ("gpt_oss", "v1")], ids=lambda value: value
)
def test_e4_several_groups(models, plain, model, kind):
    """E4: vLLM's hybrid KV-cache manager stays on, and all groups are reused right, in chunks as well.

    What was loaded is offered by vLLM's own cache too, to a request whose window ends elsewhere. With spoilt blocks
    answers differ.
    """
    script = [ASK, ResetLocal(), ASK, SHARED, Corrupt(), ResetLocal(), ASK]
    ours = engines.run(serve, runner=kind, model=models(model), connector=type1(), script=script, **IN_CHUNKS)
    cold, warm, shared, spoilt = ours.rounds
    for outputs in (cold.outputs, warm.outputs):
        compare(outputs, plain(model)[0], atol=CLOSE)
    compare(shared.outputs, plain(model)[1], atol=CLOSE)
    stored = (210 // BLOCK + 333 // BLOCK) * BLOCK
    assert [r.counts["tokens_loaded"] for r in (cold, warm, spoilt)] == [0, stored, stored]
    assert cold.counts["tokens_saved"] == stored
    assert warm.counts["tokens_skipped"] == stored - 1  # the first chunk has to compute one
    assert warm.counts["blocks_loaded"] > 2 * warm.counts["tokens_loaded"] // BLOCK - 1
    with pytest.raises(AssertionError, match="request"):
        compare(spoilt.outputs, plain(model)[0], atol=CLOSE)
    assert not any(ours.leftovers.values())


def test_c6_preempted_with_several_groups(models):
    """C6: over a pool that is too small, a preempted request's blocks of all groups are elsewhere when it resumes."""
    prompts = [prompt(156 + i, 40 + i) for i in range(4)]
    arguments = {"model": models("gemma3"), "max_model_len": 256}
    ask = Generate(prompts, 40)
    without = engines.run(serve, script=[ask], **arguments)
    ours = engines.run(serve, connector=type1(), script=[ask, ResetLocal(), ask], num_gpu_blocks=36, **arguments)
    assert ours.preemptions > 0
    for one in ours.rounds:
        compare(one.outputs, without.rounds[0].outputs, atol=CLOSE)
    assert ours.rounds[1].counts["tokens_loaded"] > 4 * 128
    assert not any(ours.leftovers.values())
