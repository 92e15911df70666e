"""type2 beside other features of an engine: drafts, failing loads, L2, vLLM's metrics, refusals."""

from __future__ import annotations

from collections import Counter

import pytest

from support import engines
from support import llm as engine
from support.driver import Corrupt, Generate, OneByOne, ResetLocal, counts, drive, leftovers, type2
from support.llm import compare
from support.models import model_path
from support.reuse import CLOSE, assert_differ, assert_nothing_left, loaded, prompt

pytestmark = pytest.mark.engine

BLOCK = 32
TEXTS = [prompt(150, 1), prompt(97, 2)]
ASK = Generate(TEXTS, 8)

_plain = {}


def plain(model, ask=ASK):
    """Return what an engine without a connector answers, on the first runner."""
    key = model, repr(ask)
    if key not in _plain:
        _plain[key] = engines.run(drive, model=model_path(model), script=[ask], timeout=120).rounds[0].outputs
    return _plain[key]


@pytest.mark.parametrize(
    ("method", "draft", "dropped"), [("draft_model", "llama_noisy", 0), ("eagle", "llama_eagle", 2)]
)
def test_drafts(runner, method, draft, dropped):
    """With a draft model and EAGLE outputs equal plain decoding; the last block of a hit isn't used with EAGLE."""
    speculation = {"method": method, "model": model_path(draft), "num_speculative_tokens": 3}
    ours = engines.run(
        drive,
        runner=runner,
        timeout=120,
        model=model_path("llama"),
        script=[ASK, ResetLocal(), ASK, Corrupt(), ResetLocal(), ASK],
        connector=type2(),
        speculative_config=speculation,
    )
    cold, warm, spoilt = ours.rounds
    compare(cold.outputs, plain("llama"), atol=CLOSE)
    compare(warm.outputs, plain("llama"), atol=CLOSE)
    assert_differ(spoilt.outputs, plain("llama"))
    assert loaded([warm]) == [150 // BLOCK + 97 // BLOCK - dropped]
    assert_nothing_left(ours)


def failing(*, model, connector, prompts):
    """Serve cold, then warm while every load raises after it moved data, then warm again."""
    llm = engine.make_llm(model, connector=connector)
    rounds = [engine.generate(llm, prompts, 8)]
    engine.settle(llm)
    engine.reset_local_cache(llm)
    worker = engine.connector(llm).worker
    layers = worker._layers
    caches = worker._paged_to_load.caches if layers is None else list(layers._to_load.values())
    calls = []
    inner = [cache.scatter for cache in caches]

    def fail(*_args, **_kwargs):
        calls.append(1)
        raise OSError("no such memory")

    for cache in caches:
        cache.scatter = fail
    rounds.append(engine.generate(llm, prompts, 8))
    for cache, scatter in zip(caches, inner, strict=True):
        cache.scatter = scatter
    engine.settle(llm)
    engine.reset_local_cache(llm)
    rounds.append(engine.generate(llm, prompts, 8))
    return rounds, len(calls), counts(llm), leftovers(llm)


@pytest.mark.parametrize(
    ("runner", "model", "transfer"),
    [
        *((runner, model, "between_steps") for runner in ("v1", "v2") for model in ("llama", "gemma3")),
        ("v1", "llama", "layerwise"),  # the second one can't: see test_a1_…
    ],
)
def test_a2_a4_failed_loads_are_computed(runner, model, transfer):
    """A2, A4: with policy recompute a load that fails costs a hit and nothing else, of one group and of several."""
    connector = type2(transfer=transfer) | {"kv_load_failure_policy": "recompute"}
    rounds, calls, totals, left = engines.run(
        failing, runner=runner, timeout=120, model=model_path(model), connector=connector, prompts=TEXTS
    )
    for outputs in rounds:
        compare(outputs, plain(model), atol=CLOSE)
    assert calls >= 2
    assert totals["load_errors"] == 2
    assert totals["blocks_loaded"] > 0  # the third time
    assert not any(left.values()), left


def measured(*, model, connector):
    """Return vLLM's counts of external hits for a prompt of which vLLM has a part and L1 another."""
    from prometheus_client import REGISTRY

    llm = engine.make_llm(model, connector=connector, disable_log_stats=False, max_model_len=1100)
    text = prompt(1000, 5)
    engine.generate(llm, [text[:800]], 1)
    engine.settle(llm)
    engine.reset_local_cache(llm)
    # 18 blocks in vLLM's own cache: too short a prompt to leave more there.
    connector_half = engine.scheduler(llm).connector
    inner = connector_half.get_num_new_matched_tokens
    connector_half.get_num_new_matched_tokens = lambda *_: (0, False)
    engine.generate(llm, [text[:600]], 1)
    connector_half.get_num_new_matched_tokens = inner

    def sample():
        names = ("vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total")
        found = {s.name: s.value for metric in REGISTRY.collect() for s in metric.samples if s.name in names}
        return [found[name] for name in names]

    before = sample()
    (answer,) = llm.generate([{"prompt_token_ids": text}], use_tqdm=False)
    return [b - a for a, b in zip(before, sample(), strict=True)], answer.num_cached_tokens


def test_i15_vllms_own_metrics(runner):
    """I15: of 1000 tokens vLLM has 576 itself and L1 has 800: 424 are asked for, 224 found, 800 told to the client."""
    (queries, found), cached = engines.run(
        measured, runner=runner, timeout=120, model=model_path("llama"), connector=type2()
    )
    assert (queries, found) == (1000 - 576, 800 - 576)
    assert cached == 800


def restarted(*, model, connector):
    """Serve prompts; then from L1; return outputs, counts, and vLLM's tokens by where they were cached."""
    from prometheus_client import REGISTRY

    def cached():
        samples = [s for metric in REGISTRY.collect() for s in metric.samples]
        return Counter(
            {
                s.labels["source"]: int(s.value)
                for s in samples
                if s.name == "vllm:prompt_tokens_cached_by_source_total" and s.value
            }
        )

    llm = engine.make_llm(model, connector=connector, disable_log_stats=False)
    rounds = []
    for _ in range(2):
        before = cached()
        outputs = [engine.generate(llm, [text], 8)[0] for text in TEXTS]
        rounds.append((outputs, dict(cached() - before)))
        engine.settle(llm)
        engine.reset_local_cache(llm)
    return rounds, leftovers(llm)


def test_a_restart_is_warm_with_disk(runner, tmp_path):
    """A new engine on the same directory finds what the first one saved, while the request waits for it.

    vLLM's metrics tell what came from L1, and what from disk.
    """
    connector = type2(l2="disk", disk_path=str(tmp_path / "l2"), disk_size="256MiB", l2_load_timeout=30, l2_timeout=60)
    expected = plain("llama", OneByOne(TEXTS, 8))
    arguments = {"model": model_path("llama"), "connector": connector, "timeout": 120}
    for source in (None, "disk"):
        rounds, left = engines.run(restarted, runner=runner, **arguments)
        for outputs, _ in rounds:
            compare(outputs, expected, atol=CLOSE)
        tokens = 128 + 96
        assert [found for _, found in rounds] == [{source: tokens} if source else {}, {"host": tokens}]
        assert not any(left.values()), left


def refused(**arguments):
    """Start an engine; return what it says."""
    try:
        engine.make_llm(**arguments)
    except Exception as error:  # noqa: BLE001 - what it says is the result
        return str(error)
    return ""


def test_a1_layerwise_failures_are_not_recomputed_on_the_second_runner():
    """A1: vLLM's second runner goes on where a rejected synchronous load would have ended. So that is refused."""
    said = engines.run(
        refused,
        runner="v2",
        timeout=120,
        model=model_path("llama"),
        connector=type2(transfer="layerwise") | {"kv_load_failure_policy": "recompute"},
    )
    assert 'leave kv_load_failure_policy at "fail"' in said


def test_layerwise_with_several_groups_is_refused():
    """Layer by layer there's no way to report a failed load of several groups: the engine says so and doesn't start."""
    said = engines.run(refused, timeout=120, model=model_path("gemma3"), connector=type2(transfer="layerwise"))
    assert "set transfer to between_steps" in said
