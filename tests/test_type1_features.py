"""type1 beside other features of an engine: draft layers, other connectors, failing loads."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from support import engines
from support import llm as engine
from support.driver import Corrupt, Generate, OneByOne, ResetLocal, counts, drive, leftovers, type1
from support.llm import compare

pytestmark = pytest.mark.engine

BLOCK = 32
CLOSE = 1e-5


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def eagle(*, model, draft, prompts, too_early=False):
    """Serve with an EAGLE draft cold and warm, and compare what was stored with the paged cache after the step.

    `too_early` saves when vLLM asks for finished transfers, which on the first runner is before the draft runs.
    """
    import numpy as np

    from kvplug.store import Slab

    llm = engine.make_llm(
        model,
        connector=type1(),
        speculative_config={"method": "eagle", "model": draft, "num_speculative_tokens": 3},
    )
    worker = engine.connector(llm).worker
    saved = {}
    inner = worker.save

    def save(metadata):
        inner(metadata)
        for request in metadata.saves:
            saved.update(zip(request.keys, request.block_ids, strict=True))

    worker.save = save
    if too_early:
        connector = engine.connector(llm)
        connector.get_finished = lambda _ids: (connector.wait_for_save(), (None, None))[1]
    cold = engine.generate(llm, prompts, 40)
    layers = len(worker.paged.layers)
    slab = Slab(1, worker.paged.block_bytes)
    different = 0
    for key, block in saved.items():
        worker.paged.gather([block], slab, [0]).wait()
        with worker.tier.reading([key]) as (slot,):
            different += not np.array_equal(
                slab.view(0)[: worker.paged.block_bytes], worker.tier.slab.view(slot)[: worker.paged.block_bytes]
            )
    engine.reset_local_cache(llm)
    warm = engine.generate(llm, prompts, 40)
    return cold, warm, layers, len(saved), different, counts(llm), leftovers(llm)


def test_e8_draft_layers_are_saved_after_the_draft_ran(runner, models):
    """E8: what is stored of a block equals the paged cache when the step is over, EAGLE's layer included.

    Tokens equal plain greedy decoding, cold and warm. The last block of a hit isn't used.
    """
    prompts = [prompt(150, 1), prompt(70, 2)]
    plain = engines.run(drive, runner="v1", model=models("llama"), script=[Generate(prompts, 40)])
    cold, warm, layers, saved, different, totals, left = engines.run(
        eagle, runner=runner, timeout=300, model=models("llama"), draft=models("llama_eagle"), prompts=prompts
    )
    assert layers == 4 + 1
    assert saved >= 150 // BLOCK + 70 // BLOCK
    assert different == 0
    for outputs in (cold, warm):
        assert [o.tokens for o in outputs] == [o.tokens for o in plain.rounds[0].outputs]
    assert totals["tokens_loaded"] == (150 // BLOCK - 1 + 70 // BLOCK - 1) * BLOCK
    assert not any(left.values())


def test_e8_the_control(models):
    """Saved before the draft runs, EAGLE's layer isn't what the paged cache has when the step is over."""
    arguments = {"model": models("llama"), "draft": models("llama_eagle"), "prompts": [prompt(150, 1)]}
    _, _, _, saved, different, _, _ = engines.run(eagle, timeout=300, too_early=True, **arguments)
    assert different == saved


def test_c15_asynchronous_scheduling(runner, models):
    """C15: the scheduler runs ahead of the tokens: decoded blocks are stored right, preemptions and chunks included."""
    prompts = [prompt(156 + i, 40 + i) for i in range(3)]
    arguments = {"model": models("llama"), "num_gpu_blocks": 16, "max_model_len": 256, "max_num_batched_tokens": 100}
    plain = engines.run(drive, model=models("llama"), script=[OneByOne(prompts, 40)])
    answers = [o.tokens for o in plain.rounds[0].outputs]
    longer = [[*text, *answer[:39]] for text, answer in zip(prompts, answers, strict=True)]
    plain_longer = engines.run(drive, model=models("llama"), script=[OneByOne(longer, 4)])
    script = [Generate(prompts, 40), ResetLocal(), OneByOne(longer, 4), Corrupt(), ResetLocal(), OneByOne(longer, 4)]
    ours = engines.run(
        drive, runner=runner, timeout=300, connector=type1(), asynchronous=True, script=script, **arguments
    )
    compare(ours.rounds[0].outputs, plain.rounds[0].outputs, atol=CLOSE)
    compare(ours.rounds[1].outputs, plain_longer.rounds[0].outputs, atol=CLOSE)
    assert ours.preemptions > 0
    # All of the 195 or so tokens but the last block's rest were stored, generated ones included.
    assert ours.rounds[1].counts["tokens_loaded"] > 3 * 170
    with pytest.raises(AssertionError, match="request"):
        compare(ours.rounds[2].outputs, plain_longer.rounds[0].outputs, atol=CLOSE)
    assert not any(ours.leftovers.values())


def beside_example(*, model, prompts, storage):
    """Serve with type1 behind vLLM's ExampleConnector under MultiConnector: the first one that has tokens loads."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": storage},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [example, type1()]},
    }
    llm = engine.make_llm(model, connector=both)
    worker = engine.connector(llm)._connectors[1].worker
    other = engine.scheduler(llm).connector._connectors[0]
    inner = other.get_num_new_matched_tokens
    promised = []

    def get_num_new_matched_tokens(request, num_computed_tokens):
        promised.append(inner(request, num_computed_tokens))
        return promised[-1]

    other.get_num_new_matched_tokens = get_num_new_matched_tokens
    rounds = []
    for ask in (prompts[:1], prompts, prompts[1:]):
        engine.reset_local_cache(llm)
        before = Counter(worker.stats.totals())
        promised.clear()
        outputs = [engine.generate(llm, [text], 4)[0] for text in ask]
        rounds.append((outputs, Counter(worker.stats.totals()) - before, sum(tokens for tokens, _ in promised)))
    return rounds


def test_f4_beside_another_connector(runner, models, tmp_path):
    """F4, F7: under MultiConnector behind vLLM's ExampleConnector outputs are right whoever loads.

    What the other connector loads, type1 neither loads nor stores again: it can't vouch for it.
    """
    prompts = [prompt(165, 3), prompt(101, 4)]
    plain = engines.run(drive, model=models("llama"), script=[OneByOne(prompts, 4)])
    expected = plain.rounds[0].outputs
    rounds = engines.run(
        beside_example, runner=runner, timeout=300, model=models("llama"), prompts=prompts, storage=str(tmp_path)
    )
    for (outputs, _, _), wanted in zip(rounds, (expected[:1], expected, expected[1:]), strict=True):
        compare(outputs, wanted, atol=CLOSE)
    # Cold, type1 stores; where the other one has promised tokens, it keeps out of it.
    assert [promised for _, _, promised in rounds] == [0, 160, 96]
    assert [counts["blocks_saved"] for _, counts, _ in rounds] == [165 // BLOCK, 101 // BLOCK, 0]
    assert [counts["tokens_loaded"] for _, counts, _ in rounds] == [0, 0, 0]


def two_engines(*, model, prompts):
    """Start a second engine in the first one's process; return what the first one answers, and what that says."""
    first = engine.make_llm(model, connector=type1())
    before = engine.generate(first, prompts, 4)
    try:
        engine.make_llm(model, connector=type1())
        said = None
    except Exception as error:  # noqa: BLE001 - whatever it is, its text is what a user sees
        said = repr(error)
    engine.reset_local_cache(first)
    return before, engine.generate(first, prompts, 4), said


def test_two_engines_in_one_process(models):
    """There is one connector per process in vLLM: a second engine is refused, and the first one goes on being right."""
    before, after, said = engines.run(two_engines, model=models("llama"), prompts=[prompt(150, 5)])
    assert said is not None
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=1" in said
    compare(after, before, atol=CLOSE)


def failing(*, model, prompts, what):
    """Serve while loads, or saves, raise in the middle of their work."""
    llm = engine.make_llm(model, connector=type1())
    worker = engine.connector(llm).worker
    outputs = [engine.generate(llm, prompts, 4)]
    engine.reset_local_cache(llm)
    inner = getattr(worker.paged, what)
    calls = []

    def fail(*args):
        calls.append(args)
        inner(*args)
        raise ConnectionError("the store is gone")

    setattr(worker.paged, what, fail)
    if what == "gather":
        worker.tier.clear()
    outputs.append(engine.generate(llm, prompts, 4))
    setattr(worker.paged, what, inner)
    engine.reset_local_cache(llm)
    outputs.append(engine.generate(llm, prompts, 4))
    return outputs, len(calls), counts(llm), leftovers(llm)


@pytest.mark.parametrize("what", ["scatter", "gather"])
def test_a2_a4_a7_failures_while_serving(runner, models, what):
    """A2, A4, A7: a load or save that fails, even after it moved data, costs hits and nothing else; it recovers."""
    prompts = [prompt(150, 5)]
    plain = engines.run(drive, model=models("llama"), script=[OneByOne(prompts, 4)])
    outputs, calls, totals, left = engines.run(
        failing, runner=runner, model=models("llama"), prompts=prompts, what=what
    )
    assert calls == 1
    assert totals["load_errors" if what == "scatter" else "save_errors"] == 1
    for one in outputs:
        compare(one, plain.rounds[0].outputs, atol=CLOSE)
    assert totals["tokens_loaded"] == (128 if what == "scatter" else 0)
    assert not any(left.values())


def test_a_deaf_hook_would_be_noticed(models):
    """The control of all equality tests here: spoilt blocks change the outputs."""
    prompts = [prompt(150, 5)]
    script = [OneByOne(prompts, 4), Corrupt(), ResetLocal(), OneByOne(prompts, 4)]
    ours = engines.run(drive, model=models("llama"), connector=type1(), script=script)
    with pytest.raises(AssertionError, match="request 0"):
        compare(ours.rounds[1].outputs, ours.rounds[0].outputs, atol=CLOSE)
