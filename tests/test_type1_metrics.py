"""What an operator sees of type1 on a running engine: `/metrics`, the log line; and requests announced ahead."""

from __future__ import annotations

import random

import pytest

from support import engines
from support import llm as engine
from support.driver import Generate, ResetAll, ResetLocal, count_preemptions, drive, leftovers, perform, type1

pytestmark = pytest.mark.engine

BLOCK = 32
#: Bytes of a block of the test model: 4 layers, 2 KV heads, 32 values each of K and V, float32.
BLOCK_BYTES = 4 * BLOCK * 2 * (32 + 32) * 4


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def scraped(llm):
    """Return kvplug's and vLLM's samples that `/metrics` would show, by name; a histogram's count and sum."""
    from prometheus_client import REGISTRY

    samples = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            name = sample.name.removeprefix("vllm:kvplug_")
            samples[":".join([name, *filter(None, [sample.labels.get("reason")])])] = sample.value
    return samples


def observed(*, model, script):
    """Take an engine that logs stats through a script; return what could be scraped after each, and the log lines."""
    import logging

    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    llm = engine.make_llm(model, connector=type1(), disable_log_stats=False)
    logging.getLogger("vllm.v1.metrics.loggers").addHandler(Keep())
    samples = []
    for operation in script:
        if operation == "veto":
            promise_in_vain(llm)
            continue
        perform(llm, operation)
        samples.append(scraped(llm))
    llm.llm_engine.do_log_stats()
    return samples, lines


def promise_in_vain(llm):
    """Have the scheduler half offer the loads of one request that must not be shortened: prompt log-probabilities."""
    scheduler = engine.scheduler(llm).connector.scheduler
    inner = scheduler._load

    def load(tracked, *args):
        scheduler._tables.vetoes.clear()
        tracked.request.skip_reading_prefix_cache = False
        return inner(tracked, *args)

    scheduler._load = load


def test_metrics_tell_what_happened(runner, models):
    """Requests, tokens, blocks and bytes are those of the traffic; durations, L1's use and vetoes are there.

    B12, I15: vLLM's own counts of external hits stay at 0, ours have the answer: of a prompt that vLLM has in part,
    only the rest is asked for.
    """
    text = prompt(200, 1)
    ask = Generate([text], 2)
    full = Generate([text], 2, sampling={"prompt_logprobs": 1})
    part = Generate([text[:70]], 2)
    script = [ask, ResetLocal(), ask, ResetLocal(), part, ask, "veto", ResetLocal(), full, ResetAll()]
    env = {"VLLM_LOGGING_LEVEL": "INFO"}
    samples, lines = engines.run(observed, runner=runner, env=env, model=models("llama"), script=script, timeout=240)
    cold, _, warm, _, partly, again, _, vetoed, _ = samples
    assert [cold[f"prefix_cache_{name}_total"] for name in ("queries", "hits")] == [200, 0]
    assert (cold["blocks_saved_total"], cold["tokens_saved_total"]) == (6, 192)
    assert cold["saved_bytes_total"] == 6 * BLOCK_BYTES
    assert [warm[f"prefix_cache_{name}_total"] for name in ("queries", "hits")] == [400, 192]
    assert [warm[f"requests_{name}_total"] for name in ("looked_up", "hit")] == [2, 1]
    assert [warm[f"blocks_{name}_total"] for name in ("looked_up", "hit", "loaded")] == [12, 6, 6]
    assert warm["loaded_bytes_total"] == 6 * BLOCK_BYTES
    assert (warm["load_seconds_count"], warm["save_seconds_count"], warm["hook_seconds_count"]) == (2, 2, 2)
    assert warm["l1_capacity_bytes"] == 64 * 2**20
    assert warm["l1_usage_bytes"] == 6 * BLOCK_BYTES
    # 70 tokens, then 200 of which vLLM has two blocks itself.
    assert again["prefix_cache_queries_total"] - partly["prefix_cache_queries_total"] == 200 - 64
    assert again["prefix_cache_hits_total"] - partly["prefix_cache_hits_total"] == 192 - 64
    assert vetoed["vetoes_total:prompt_logprobs"] == 1
    assert vetoed["tokens_skipped_total"] == again["tokens_skipped_total"]
    for name in ("load_errors", "save_errors", "plugin_errors", "hook_missed", "saves_refused"):
        assert vetoed[f"{name}_total"] == 0
    assert vetoed["vllm:external_prefix_cache_hits_total"] == 0
    # vLLM logs every ten seconds, so a slow run has several lines.
    said = " ".join(line for line in lines if "KV Transfer metrics" in line)
    for part in ("prefix_cache_hits=", "load_mean_ms=", "l1_usage_bytes="):
        assert part in said


def crowded(*, model, early, others, late, announce):
    """Fill a small L1, then ask for a prompt that is in it while a longer one runs before it."""
    llm = engine.make_llm(model, connector=type1(l1_size_per_rank=f"{12 * BLOCK_BYTES}B"), max_num_seqs=1)
    scheduler = engine.scheduler(llm).connector.scheduler
    if not announce:
        scheduler._announce = lambda _output: iter(())
    preemptions = count_preemptions(llm)
    for text in (early, others):
        engine.generate(llm, [text], 2)
    engine.reset_local_cache(llm)
    worker = engine.connector(llm).worker
    before = worker.stats.get("tokens_loaded")
    outputs = engine.generate(llm, [late, early], 2)
    assert not preemptions
    return outputs, worker.stats.get("tokens_loaded") - before, leftovers(llm)


def test_announced_requests_keep_their_blocks(runner, models):
    """While a request waits, what it will load isn't what makes room for others; unannounced, it is."""
    texts = {"early": prompt(165, 2), "others": prompt(165, 3), "late": prompt(200, 4)}
    plain = engines.run(drive, model=models("llama"), script=[Generate([texts["late"], texts["early"]], 2)])
    arguments = {"runner": runner, "model": models("llama"), **texts}
    outputs, loaded, left = engines.run(crowded, announce=True, **arguments)
    engine.compare(outputs, plain.rounds[0].outputs, atol=1e-5)
    assert loaded == 160
    assert not any(left.values())
    assert engines.run(crowded, announce=False, **arguments)[1] == 32
