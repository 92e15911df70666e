"""Public failures of other connectors (their ids are in the names), tried on real engines with type1."""

from __future__ import annotations

import random

import pytest

from support import engines
from support import llm as engine
from support.driver import (
    Corrupt,
    Generate,
    OneByOne,
    ResetLocal,
    counts,
    drive,
    keep_asynchronous_scheduling,
    leftovers,
    perform,
    type1,
)
from support.llm import compare

pytestmark = pytest.mark.engine

BLOCK = 32
#: Where a hit changes how a prompt is split into steps, sums run in another order.
CLOSE = 1e-5


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


STEM = prompt(140, 1)
#: Two requests with a common prefix.
SHARING = Generate([STEM + prompt(20, 2), STEM + prompt(30, 3)], 3)
#: Requests that end at a token which nobody foresees.
SURPRISING = Generate(
    [prompt(58 + 9 * i, 20 + i) for i in range(6)], 64, sampling={"stop_token_ids": [*range(0, 256, 12)]}
)

_plain = {}


@pytest.fixture
def plain(models):
    """Return what an engine without a connector answers to `SHARING` and `SURPRISING`, by what was asked."""
    if not _plain:
        rounds = engines.run(drive, model=models("llama"), script=[SHARING, SURPRISING]).rounds
        _plain.update(sharing=rounds[0].outputs, surprising=rounds[1].outputs)
    return _plain


def breaking_off(*, model):
    """Serve `SHARING` warm while every load fails at some block, after garbage has come into that block."""
    llm = engine.make_llm(model, connector=type1(), disable_log_stats=False)
    worker = engine.connector(llm).worker
    outputs = [perform(llm, SHARING)]
    inner = worker.paged.scatter
    for bad in (0, 2, -1):

        def scatter(slab, slots, block_ids, bad=bad):
            inner(slab, slots, block_ids)
            for cache in engine.model_runner(llm).kv_caches:
                cache[block_ids[bad]] = 1e3
            raise OSError("the read ended early")

        worker.paged.scatter = scatter
        engine.reset_local_cache(llm)
        outputs.append(perform(llm, SHARING))
        worker.paged.scatter = inner
    engine.reset_local_cache(llm)
    outputs.append(perform(llm, SHARING))
    return outputs, counts(llm), leftovers(llm)


def test_a1_a2_a4_loads_that_break_off(runner, models, plain):
    """A1, A2, A4: a load that fails at the first, a middle or the last block, on either runner: outputs stay right.

    Two requests share the block. No other request has to come for them to finish, and the next load is right.
    """
    outputs, totals, left = engines.run(breaking_off, runner=runner, timeout=300, model=models("llama"))
    for one in outputs:
        compare(one, plain["sharing"], atol=CLOSE)
    # vLLM has the second one's first blocks by the time it is scheduled: it loads at most what follows.
    assert totals["load_errors"] >= 3
    assert totals["tokens_loaded"] >= 160
    assert not any(left.values())


def test_c8_no_more_preemptions_than_without(models):
    """C8: type1 holds no block back: over a small pool, vLLM preempts exactly as often as without a connector."""
    prompts = [prompt(90 + i, 10 + i) for i in range(8)]
    arguments = {"model": models("llama"), "num_gpu_blocks": 20, "max_model_len": 256}
    without = engines.run(drive, script=[Generate(prompts, 40)], **arguments)
    ours = engines.run(drive, script=[Generate(prompts, 40)], connector=type1(), **arguments)
    assert without.preemptions > 1
    assert ours.preemptions == without.preemptions
    compare(ours.rounds[0].outputs, without.rounds[0].outputs, atol=CLOSE)
    assert ours.rounds[0].counts["tokens_loaded"] > 0


def ending_by_surprise(*, model):
    """Serve `SURPRISING` over a small pool: requests end while their next step is on its way.

    Returns what was answered, cold and then from L1, how often a step was on its way for a request that had ended,
    the tokens that were loaded, and what is left.
    """
    keep_asynchronous_scheduling()
    llm = engine.make_llm(model, connector=type1(), num_gpu_blocks=16, max_model_len=256, max_num_batched_tokens=100)
    scheduler = engine.scheduler(llm)
    in_flight = []
    inner = scheduler.update_from_output

    def update(scheduler_output, output):
        in_flight.extend(name for name in scheduler_output.num_scheduled_tokens if name not in scheduler.requests)
        return inner(scheduler_output, output)

    scheduler.update_from_output = update
    rounds = []
    for _ in range(2):
        rounds.append(perform(llm, SURPRISING))
        while llm.llm_engine.engine_core.engine_core.batch_queue:
            llm.llm_engine.step()
        engine.reset_local_cache(llm)
    return rounds, len(in_flight), counts(llm)["tokens_loaded"], leftovers(llm)


def test_c11_requests_that_end_while_their_next_step_is_on_its_way(models, plain):
    """C11: asynchronous scheduling has planned one more step for them, and their blocks go to others at once."""
    assert all(len(output.tokens) < SURPRISING.max_tokens for output in plain["surprising"])
    rounds, in_flight, loaded, left = engines.run(ending_by_surprise, timeout=300, model=models("llama"))
    for outputs in rounds:
        compare(outputs, plain["surprising"], atol=CLOSE)
    assert in_flight >= len(SURPRISING.prompts)
    assert loaded > 300
    assert not any(left.values())


def test_e4_a_hybrid_model_as_one_group(models):
    """E4: where the hybrid KV-cache manager is switched off, sliding and full layers are one group, reused right."""
    ask = OneByOne([prompt(150, 30), prompt(101, 31)], 4)
    script = [ask, ResetLocal(), ask, Corrupt(), ResetLocal(), ask]
    ours = engines.run(
        drive,
        model=models("gemma3"),
        connector=type1(),
        script=script,
        timeout=300,
        disable_hybrid_kv_cache_manager=True,
    )
    cold, warm, spoilt = ours.rounds
    compare(warm.outputs, cold.outputs, atol=CLOSE)
    assert [r.counts["tokens_loaded"] for r in ours.rounds] == [0, 128 + 96, 128 + 96]
    with pytest.raises(AssertionError, match="request"):
        compare(spoilt.outputs, cold.outputs, atol=CLOSE)
