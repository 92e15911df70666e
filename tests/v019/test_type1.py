"""type1 on vLLM 0.19.1, an old release: it serves, outputs equal a plain engine's, and its metrics arrive.

Run by ``make test-0.19``, in an environment of its own. The release's CPU worker has the first model runner only; the
second one can be imported, which is how far it is tested here.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support import engines
from support import llm as engine
from support.driver import TYPE1, Corrupt, Generate, OneByOne, ResetLocal, drive
from support.llm import compare
from support.servers import serve

pytestmark = pytest.mark.engine

BLOCK = 32
#: Log-probabilities of one prompt in this release, without any connector: computed at once, against after a hit in
#: vLLM's own prefix cache. They differ by up to 2e-5; with spoilt blocks other tokens come out.
CLOSE = 5e-5


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def run(script, models, **kwargs):
    return engines.run(drive, timeout=300, model=models("llama"), script=script, **kwargs)


def assert_differ(one, other):
    """The negative control: the comparison that passed must fail here."""
    with pytest.raises(AssertionError, match="request"):
        compare(one, other, atol=CLOSE)


def versions():
    import vllm

    return vllm.__version__


def test_the_old_release_is_what_runs():
    """The environment has vLLM 0.19.1, whichever build."""
    assert engines.run(versions).partition("+")[0] == "0.19.1"


def test_hits(models):
    """Cold, warm and partly shared prompts equal a plain engine's.

    Where vLLM's own cache hits as much as L1 does, log-probabilities are equal to the bit: that is the same
    computation. So loaded blocks are exactly those that were saved.
    """
    prompts = [prompt(330, 1), prompt(100, 2), prompt(33, 3), prompt(31, 4)]
    prompts.append(prompts[0][:200] + prompt(90, 5))
    ask = OneByOne(prompts, 6)
    plain = run([ask, ask], models)
    ours = run([ask, ResetLocal(), ask, Corrupt(), ResetLocal(), ask], models, connector=TYPE1)
    cold, warm, corrupted = ours.rounds
    compare(cold.outputs, plain.rounds[0].outputs)
    compare(warm.outputs, plain.rounds[1].outputs)
    compare(warm.outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert_differ(corrupted.outputs, plain.rounds[0].outputs)
    assert cold.counts["tokens_loaded"] == 0
    # The last one finds six blocks in vLLM's own cache, and three in L1.
    assert warm.counts["tokens_loaded"] == warm.counts["tokens_skipped"] == 320 + 96 + 32 + 3 * BLOCK
    assert not any(ours.leftovers.values())


def test_chunked_concurrent_and_preempted(models):
    """Requests in chunks, more at once than fit, are preempted and resumed: outputs equal those of requests alone."""
    prompts = [prompt(156 + i, 20 + i) for i in range(3)]
    ask = Generate(prompts, 40)
    plain = run([OneByOne(prompts, 40)], models)
    ours = run(
        [ask, ask, Corrupt(), Generate(prompts, 8)],
        models,
        connector=TYPE1,
        num_gpu_blocks=16,
        max_model_len=256,
        max_num_batched_tokens=100,
        enable_prefix_caching=False,
    )
    cold, warm, corrupted = ours.rounds
    assert ours.preemptions >= 2
    for outputs in (cold.outputs, warm.outputs):
        compare(outputs, plain.rounds[0].outputs, atol=CLOSE)
    assert warm.counts["tokens_loaded"] > 3 * 100
    assert_differ(corrupted.outputs, [output.first(8) for output in plain.rounds[0].outputs])
    assert not any(ours.leftovers.values())


def hook(*, model, prompts):
    """Record the calls of two steps, and what is known of the hook."""
    import inspect
    import sys

    from kvplug import compat

    llm = engine.make_llm(model, connector=TYPE1)
    connector, runner = engine.connector(llm), engine.model_runner(llm)
    calls, given = [], []

    def record(owner, name, label):
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            calls.append(label)
            if label == "handle_preemptions":
                given.extend(type(argument).__name__ for argument in args)
            return inner(*args, **kwargs)

        setattr(owner, name, call)

    record(connector, "handle_preemptions", "handle_preemptions")
    record(connector.worker, "load", "load")
    record(runner, "_update_states", "state update")
    record(runner.model, "forward", "forward")
    record(connector.worker, "save", "save")
    engine.generate(llm, prompts, 2)
    file = inspect.getsourcefile(sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner)
    return calls, set(given), compat.hook_delivery(type(runner)), file


def test_the_hook_is_live(models):
    """The hook comes between vLLM's preemption call, which takes metadata in this release, and the state update."""
    calls, given, delivery, file = engines.run(hook, model=models("llama"), prompts=[prompt(70, 6)])
    step = ["handle_preemptions", "load", "state update", "forward", "save"]
    assert calls[:10] == step * 2
    assert given == {"Type1Metadata"}
    assert delivery == "import"
    assert "before_update_states" not in Path(file).read_text()


def second_runner():
    """Import the second model runner as a GPU worker does, after vLLM's plugins."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from kvplug import compat

    return compat.runner_kind(GPUModelRunner), compat.hook_delivery(GPUModelRunner)


def test_the_second_runner_has_the_hook():
    """The second runner of this release, which only GPUs run, gets the hook as it is imported."""
    assert engines.run(second_runner) == ("v2", "import")


def test_metrics_reach_the_server(models):
    """In processes of their own, what both halves count arrives on the server's /metrics; vLLM's own hits stay 0.

    This release asks the scheduler half only in steps in which a worker has something to tell, so the last request's
    hit shows with the next one's lookup.
    """
    text = prompt(330, 7)
    with serve(models("llama"), connector=TYPE1) as server:
        cold = server.complete(text)
        assert server.metric("vllm:kvplug_tokens_loaded_total") == 0
        server.post("/reset_prefix_cache")
        warm = server.complete(text)
        assert warm["text"] == cold["text"]
        server.complete(prompt(33, 8))
        metrics = {
            name: server.metric(f"vllm:kvplug_{name}")
            for name in (
                *("blocks_saved_total", "tokens_loaded_total", "tokens_skipped_total", "hook_seconds_count"),
                *("prefix_cache_queries_total", "prefix_cache_hits_total", "l1_usage_bytes"),
            )
        }
        blocks = 330 // BLOCK + 33 // BLOCK
        assert metrics == {
            "blocks_saved_total": blocks,
            "tokens_loaded_total": 320,
            "tokens_skipped_total": 320,
            "hook_seconds_count": 3,
            "prefix_cache_queries_total": 330 + 330 + 33,
            "prefix_cache_hits_total": 320,
            "l1_usage_bytes": blocks * BLOCK * 2 * 4 * 2 * 32 * 4,  # K and V, layers, heads, head size, float32
        }
        assert "vllm:external_prefix_cache_hits_total{" in server.get("/metrics")
        assert server.metric("vllm:external_prefix_cache_hits_total") == 0
