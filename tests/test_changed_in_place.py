"""AIBrix's way of shortening a step against ours: what is known to go wrong with it, and doesn't with ours.

Each test takes one engine through the same requests twice, first with our hook, then with `support.in_place`. Engine,
connector, stored blocks and metadata are the same, so only the way differs. What would hang is bounded by a number
of steps.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from support import engines
from support import llm as engine
from support.driver import TYPE1, corrupt, counts, keep_asynchronous_scheduling
from support.in_place import LOAD, replace_hook, shorten_in_place
from support.llm import compare

pytestmark = pytest.mark.engine

OURS, IN_PLACE = WAYS = ("ours", "in place")

BLOCK = 32
#: Where a hit changes how a prompt is split into steps, sums run in another order.
CLOSE = 1e-5
#: What a row of prompt log-probabilities has if nothing was written to it.
UNWRITTEN = -12345.0


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def each_way(llm):
    """Go through the ways, each with nothing in vLLM's own prefix cache."""
    for way in WAYS:
        if way == IN_PLACE:
            replace_hook(llm)
        engine.reset_local_cache(llm)
        yield way


def differ(one, other):
    try:
        compare(one, other, atol=CLOSE)
    except AssertionError:
        return True
    return False


# -- Where nothing special happens ----------------------------------------------------------------------------------


def hits(*, model, prompts):
    """Serve cold, warm each way, and with spoilt blocks; return the loaded tokens, and the first warm step, too."""
    llm = engine.make_llm(model, connector=TYPE1, max_num_batched_tokens=100)
    outputs = {"cold": engine.generate(llm, prompts, 4)}
    scheduler = engine.scheduler(llm)
    inner = scheduler.schedule
    steps = []

    def schedule(*args, **kwargs):
        output = inner(*args, **kwargs)
        steps.append(copy.deepcopy(output))
        return output

    scheduler.schedule = schedule
    loaded = {}
    for way in each_way(llm):
        before = counts(llm)["tokens_loaded"]
        outputs[way] = engine.generate(llm, prompts, 4)
        loaded[way] = counts(llm)["tokens_loaded"] - before
    corrupt(llm)
    engine.reset_local_cache(llm)
    outputs["spoilt"] = engine.generate(llm, prompts, 4)
    return outputs, loaded, _ranks_apart(steps[0])


def _ranks_apart(step):
    """Shorten a step in place on two ranks, of which one has a block less; return the tokens that each computes."""
    (request_id,) = step.num_scheduled_tokens
    ranks = [copy.deepcopy(step), copy.deepcopy(step)]
    for rank, num_blocks in zip(ranks, (3, 2), strict=True):
        shorten_in_place(rank, {request_id: num_blocks * BLOCK})
    return [rank.total_num_scheduled_tokens for rank in ranks]


@pytest.fixture(scope="module")
def ordinary(models):
    return engines.run(hits, model=models("llama"), prompts=[prompt(250, 1), prompt(90, 2)])


def test_the_stand_in_serves(ordinary):
    """Where nothing special happens, that way is right too, chunks included: what fails below isn't the stand-in."""
    outputs, loaded, _ = ordinary
    for way in WAYS:
        compare(outputs[way], outputs["cold"], atol=CLOSE)
    assert loaded[OURS] == loaded[IN_PLACE] > 250
    assert differ(outputs["spoilt"], outputs["cold"])


def test_ranks_and_stages_that_loaded_different_amounts(ordinary):
    """A rank with a block less computes a block more: activations of two shapes meet in the next collective.

    Ours: tensor-parallel ranks agree on the minimum (`test_b3_tensor_parallel_ranks_agree` has them disagree on real
    engines), and pipeline stages, which can't, are refused when the engine starts.
    """
    from kvplug import compat
    from kvplug.errors import UnsupportedError

    _, _, computed = ordinary
    assert computed == [100 - 3 * BLOCK, 100 - 2 * BLOCK]
    parallel = SimpleNamespace(pipeline_parallel_size=2, tensor_parallel_size=1)
    with pytest.raises(UnsupportedError, match=r"pipeline parallelism \(2\)"):
        compat.refuse_split_dimensions(SimpleNamespace(parallel_config=parallel), "Type1Connector")


# -- The scheduler's own object -------------------------------------------------------------------------------------


def more_than_fits(*, model, prompts, max_tokens):
    """Serve requests of which some are preempted, cold and each way.

    Returns:
        By way: each request's tokens, or None if it didn't finish; the steps; tokens in flight at each preemption; and
        the first two of loads and vLLM's preemption calls in each step with a preemption.
    """
    llm = engine.make_llm(model, connector=TYPE1, num_gpu_blocks=16, max_model_len=256, enable_prefix_caching=False)
    in_flight, calls = [], []
    scheduler, connector = engine.scheduler(llm), engine.connector(llm)

    def record(owner, name, label):
        inner = getattr(owner, name)

        def call(first, *args, **kwargs):
            calls.append(label)
            if label == "preemption":
                in_flight.append(first.num_in_flight_tokens)
            return inner(first, *args, **kwargs)

        setattr(owner, name, call)

    record(scheduler, "_preempt_request", "preemption")
    record(connector, "handle_preemptions", "handle_preemptions")
    record(connector.worker, "load", "load")
    results = {"cold": _steps(llm, "cold", prompts, max_tokens, limit=500)}
    for way in each_way(llm):
        in_flight.clear()
        calls.clear()
        tokens, steps = _steps(llm, way, prompts, max_tokens, limit=3 * results["cold"][1])
        following = [calls[i + 1 : i + 3] for i, label in enumerate(calls) if label == "preemption"]
        results[way] = tokens, steps, list(in_flight), [pair for pair in following if pair[0] != "preemption"]
    return results


def _steps(llm, name, prompts, max_tokens, limit):
    """Generate greedily in at most `limit` steps; return the tokens of what has finished, and the steps."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    ids = [f"{name} {number}" for number in range(len(prompts))]
    for request_id, text in zip(ids, prompts, strict=True):
        llm.llm_engine.add_request(request_id, TokensPrompt(prompt_token_ids=text), parameters)
    finished = {}
    steps = 0
    while llm.llm_engine.has_unfinished_requests() and steps < limit:
        steps += 1
        for answer in llm.llm_engine.step():
            if answer.finished:
                finished[answer.request_id] = list(answer.outputs[0].token_ids)
    return [finished.get(request_id) for request_id in ids], steps


@pytest.fixture(scope="module")
def preempting(models):
    # Three prompts of five blocks, and two more each to generate, in a cache of 15 blocks.
    prompts = [prompt(156 + i, 20 + i) for i in range(3)]
    return engines.run(more_than_fits, model=models("llama"), prompts=prompts, max_tokens=40)


def test_a_preempted_request_never_finishes(preempting):
    """In a process with the scheduler, the changed object is the scheduler's own, and its counts go wrong.

    What it subtracts after the step is less than it added before: tokens stay in flight for ever. It looks right until
    a preemption, after which it waits for their result, and the request never runs again.
    """
    expected, _ = preempting["cold"]
    tokens, _, in_flight, _ = preempting[OURS]
    assert tokens == expected
    assert in_flight
    assert not any(in_flight)
    tokens, _, in_flight, _ = preempting[IN_PLACE]
    assert None in tokens
    assert any(in_flight)


def test_loads_come_before_the_preemption_call(preempting):
    """That way loads before vLLM tells the connector what was preempted, whose blocks may be those loaded into."""
    *_, order = preempting[OURS]
    assert order
    assert all(pair == ["handle_preemptions", "load"] for pair in order)
    *_, order = preempting[IN_PLACE]
    assert order
    assert all(pair == ["load", "handle_preemptions"] for pair in order)


# -- Requests that must not be shortened ----------------------------------------------------------------------------


class _Nothing(dict):
    """A dict that seems to have nothing in it."""

    def __contains__(self, key):
        return False


def prompt_logprobs(*, model, text):
    """Ask for prompt log-probabilities, cold and each way; return them, the vetoes by then, and all loaded tokens."""
    from vllm.v1.outputs import LogprobsTensors

    inner = LogprobsTensors.empty_cpu

    def empty_cpu(*args):
        tensors = inner(*args)
        tensors.logprob_token_ids.zero_()
        tensors.selected_token_ranks.zero_()
        tensors.logprobs.fill_(UNWRITTEN)
        return tensors

    LogprobsTensors.empty_cpu = staticmethod(empty_cpu)
    llm = engine.make_llm(model, connector=TYPE1)
    # AIBrix's scheduler half offers every request to the worker. Ours doesn't: what is tested here is the way itself.
    engine.scheduler(llm).connector.scheduler._tables.vetoes = _Nothing()
    rows = {"cold": _prompt_rows(llm, text)}
    vetoes = {}
    for way in each_way(llm):
        rows[way] = _prompt_rows(llm, text)
        vetoes[way] = sum(count for name, count in counts(llm).items() if name.startswith("vetoes"))
    return rows, vetoes, counts(llm)["tokens_loaded"]


def _prompt_rows(llm, text):
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, skip_reading_prefix_cache=False)
    (answer,) = llm.generate([TokensPrompt(prompt_token_ids=text)], parameters, use_tqdm=False)
    rows = [{token: entry.logprob for token, entry in row.items()} for row in answer.prompt_logprobs[1:]]
    return engine.Output(text[1:], rows)


def test_prompt_logprobs_are_never_written(models):
    """Loaded positions have no hidden states, so nothing is written to their rows. Ours leaves such requests alone."""
    rows, vetoes, loaded = engines.run(prompt_logprobs, model=models("llama"), text=prompt(100, 3))
    assert loaded == 2 * 96  # the offer was there both times
    compare([rows[OURS]], [rows["cold"]], atol=CLOSE)
    assert vetoes[OURS] == 1
    assert rows[IN_PLACE].logprobs[:96] == [{0: UNWRITTEN}] * 96
    assert UNWRITTEN not in rows[IN_PLACE].logprobs[96].values()


# -- What the runner's methods do besides ---------------------------------------------------------------------------


def speculative(*, model, draft, prompts):
    """Speculate with asynchronous scheduling, each way.

    Returns:
        By way, the generated tokens, and how often the state update returned a correction and it was made.
    """
    keep_asynchronous_scheduling()
    llm = engine.make_llm(
        model,
        connector=TYPE1,
        speculative_config={"method": "eagle", "model": draft, "num_speculative_tokens": 3},
    )
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert engine.model_runner(llm).use_async_spec_decode
    inner = GPUModelRunner._update_states
    corrections = Counter()

    def update_states(self, scheduler_output):
        correct = inner(self, scheduler_output)
        if correct is None:
            return None
        corrections["returned"] += 1

        def counted():
            corrections["made"] += 1
            correct()

        return counted

    GPUModelRunner._update_states = update_states
    engine.generate(llm, prompts, 1)
    results = {}
    for way in each_way(llm):
        corrections.clear()
        outputs = engine.generate(llm, prompts, 40)
        results[way] = [output.tokens for output in outputs], corrections["returned"], corrections["made"]
    return results


def test_corrections_of_speculation_are_lost(models):
    """The state update returns how to correct computed tokens once rejections are known; that way loses it.

    It does so in every step, also in those without any load.
    """
    arguments = {"model": models("llama"), "draft": models("llama_eagle"), "prompts": [prompt(150, 4), prompt(70, 5)]}
    results = engines.run(speculative, **arguments)
    _, returned, made = results[OURS]
    assert returned == made > 0
    _, returned, made = results[IN_PLACE]
    assert returned > 0
    assert made == 0


def zeroing(*, model, text):
    """Serve cold and each way on an engine that zeroes new blocks, as it does for models with Mamba layers."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = True
    llm = engine.make_llm(model, connector=TYPE1)
    runner = engine.model_runner(llm)
    inner = runner._zero_block_ids
    zeroed = []

    def zero_block_ids(block_ids):
        zeroed.extend(block_ids)
        inner(block_ids)

    runner._zero_block_ids = zero_block_ids
    results = {"cold": (engine.generate(llm, [text], 4), len(zeroed), 0)}
    for way in each_way(llm):
        zeroed.clear()
        before = counts(llm)["blocks_loaded"]
        results[way] = engine.generate(llm, [text], 4), len(zeroed), counts(llm)["blocks_loaded"] - before
    return results


def test_loaded_blocks_are_zeroed(models):
    """New blocks are zeroed in the state update, which comes after the load: only the rest must be."""
    results = engines.run(zeroing, model=models("llama"), text=prompt(170, 6))
    expected, num_blocks, _ = results["cold"]
    assert num_blocks == 6
    outputs, zeroed, loaded = results[OURS]
    assert (zeroed, loaded) == (1, 5)
    compare(outputs, expected, atol=CLOSE)
    outputs, zeroed, loaded = results[IN_PLACE]
    assert (zeroed, loaded) == (6, 5)
    assert differ(outputs, expected)


# -- Other runners, other connectors --------------------------------------------------------------------------------


def one_hit(*, model, text):
    """Serve cold and each way; return what the connector counted each way."""
    llm = engine.make_llm(model, connector=TYPE1)
    cold = engine.generate(llm, [text], 4)
    grown = {}
    for way in each_way(llm):
        before = counts(llm)
        compare(engine.generate(llm, [text], 4), cold, atol=CLOSE)
        grown[way] = counts(llm) - before
    return grown


def test_the_second_runner_stays_as_it_is(models):
    """On vLLM's second runner that way does nothing, without a word: the connector works and nothing is ever loaded.

    (AIBrix's own connectors end there with a KeyError, since their saves read what their loads prepare.)
    """
    grown = engines.run(one_hit, runner="v2", model=models("llama"), text=prompt(170, 7))
    assert grown[OURS]["tokens_loaded"] == 160
    assert grown[OURS]["hook_missed"] == 0
    assert grown[IN_PLACE]["tokens_loaded"] == 0
    assert grown[IN_PLACE]["hook_missed"] == 1


def other_connector(*, model, text, storage):
    """Serve with a connector of vLLM's own, each way; return what is generated until it raises, and the error."""
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    llm = engine.make_llm(model, connector=connector | {"kv_connector_extra_config": {"shared_storage_path": storage}})
    outputs = []
    with pytest.raises(AttributeError) as caught:
        outputs.extend(engine.generate(llm, [text], 4) for _ in each_way(llm))
    return outputs, str(caught.value)


def test_other_connectors_die(models, tmp_path):
    """That way calls its method on every connector, which vLLM's own don't have. Ours asks who implements a hook."""
    arguments = {"model": models("llama"), "text": prompt(100, 8)}
    outputs, error = engines.run(other_connector, **arguments, storage=str(tmp_path))
    assert [len(output.tokens) for (output,) in outputs] == [4]
    assert error == f"'ExampleConnector' object has no attribute '{LOAD}'"
