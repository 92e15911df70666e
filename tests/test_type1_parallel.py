"""type1 with tensor parallelism, on real engines with two worker processes."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest

from support import engines
from support import llm as engine
from support.driver import type1
from support.llm import compare

pytestmark = pytest.mark.engine


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def _totals(worker):
    from vllm.distributed.kv_transfer import kv_transfer_state

    from kvplug import dispatch

    totals = Counter(kv_transfer_state.get_kv_transfer_group().worker.stats.totals())
    totals.update(dispatch.current_dispatcher().stats.totals())
    return worker.rank, type(worker.model_runner).__module__, dict(totals)


def _lose_a_block(worker):
    """On the second rank only, forget the fourth block that was stored."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    allocator = kv_transfer_state.get_kv_transfer_group().worker.tier.allocator
    if worker.rank == 1:
        allocator.discard([allocator._keys[3]])


def _fail_loads(worker):
    """On the first rank only, every load raises."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    def scatter(*_args):
        raise OSError("no such memory")

    if worker.rank == 0:
        kv_transfer_state.get_kv_transfer_group().worker.paged.scatter = scatter


def two_ranks(*, model, connector, prompts):
    """Cold, warm, warm with a block missing on one rank, and warm with one rank failing."""
    import cloudpickle
    from vllm import LLM

    # Workers can't import this file: what they are asked to run travels as code.
    cloudpickle.register_pickle_by_value(sys.modules[_totals.__module__])
    llm = LLM(
        model,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        tensor_parallel_size=2,
        block_size=32,
        num_gpu_blocks_override=64,
        max_model_len=512,
        kv_transfer_config=connector,
    )
    rounds = []
    for change in (None, None, _lose_a_block, _fail_loads):
        llm.reset_prefix_cache()
        if connector and change:
            llm.collective_rpc(change)
        outputs = engine.generate(llm, prompts, 4)
        rounds.append((outputs, llm.collective_rpc(_totals) if connector else []))
    return rounds


_plain = []


def test_b3_tensor_parallel_ranks_agree(runner, models):
    """TP=2: hits equal a plain TP=2 engine's; where ranks differ, or one fails, the smaller hit counts on both."""
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    arguments = {"model": models("llama"), "prompts": [prompt(200, 1)]}
    if not _plain:  # the runners agree without a connector, see test_harness
        _plain.extend(engines.run(two_ranks, runner="v1", timeout=600, env=env, connector=None, **arguments))
    ours = engines.run(two_ranks, runner=runner, timeout=600, env=env, connector=type1(), **arguments)
    for (outputs, _), (expected, _) in zip(ours, _plain, strict=True):
        compare(outputs, expected, atol=1e-5)
    loaded, skipped = [], []
    for _, ranks in ours:
        modules = {module for _, module, _ in ranks}
        assert modules == {f"vllm.v1.worker.{'cpu.model_runner' if runner == 'v2' else 'cpu_model_runner'}"}
        loaded.append([totals.get("tokens_loaded", 0) for _, _, totals in sorted(ranks)])
        skipped.append([totals.get("tokens_skipped", 0) for _, _, totals in sorted(ranks)])
    # Totals since the start: nothing, six blocks, then rank 1 has only three (and stores the fourth again), then rank 0
    # can't load any.
    assert loaded == [[0, 0], [192, 192], [384, 288], [384, 480]]
    assert skipped == [[0, 0], [192, 192], [288, 288], [288, 288]]
    assert min(ours[3][1])[2]["load_errors"] == 1
