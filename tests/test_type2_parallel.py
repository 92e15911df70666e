"""type2 with two worker processes, and beside other connectors, on real engines."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest

from support import engines
from support import llm as engine
from support.driver import type1, type2
from support.llm import compare
from support.reuse import CLOSE, assert_differ

pytestmark = pytest.mark.engine


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def _totals(worker):
    from vllm.distributed.kv_transfer import kv_transfer_state

    totals = Counter(kv_transfer_state.get_kv_transfer_group().worker.stats.totals())
    return worker.rank, type(worker.model_runner).__module__, dict(totals)


def _spoil(worker):
    """On the second rank only, exchange what is in the slots."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    if worker.rank == 1:
        rows = kv_transfer_state.get_kv_transfer_group().worker._slab.rows
        rows[:8] = rows[:8][::-1].copy()


def two_ranks(*, model, connector, prompts):
    """Cold, warm, and warm with one rank's blocks spoilt."""
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
    for change in (None, None, _spoil):
        engine.settle(llm)
        assert llm.reset_prefix_cache()
        if change:
            llm.collective_rpc(change)
        outputs = engine.generate(llm, prompts, 4)
        rounds.append((outputs, llm.collective_rpc(_totals)))
    return rounds


def test_b3_tensor_parallel_ranks_load_the_same(models):
    """TP=2: hits equal what was computed, every rank loads them; a rank that is spoilt is noticed.

    What was computed equals a plain engine's on one rank, but for sums that are taken in another order.
    """
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    prompts = [prompt(200, 1)]
    ours = engines.run(two_ranks, timeout=600, env=env, model=models("llama"), connector=type2(), prompts=prompts)
    (plain,) = engines.run(plainly, model=models("llama"), rounds=[prompts])
    cold, warm, spoilt = (outputs for outputs, _ in ours)
    compare(cold, plain, atol=1e-4)
    compare(warm, cold, atol=CLOSE)
    assert_differ(spoilt, cold)
    loaded = [[totals.get("blocks_loaded", 0) for _, _, totals in sorted(ranks)] for _, ranks in ours]
    assert loaded == [[0, 0], [6, 6], [12, 12]]


def beside(*, model, children, first, second, folder):
    """Serve under `MultiConnector`: cold, warm, and with longer prompts; return outputs and what each child did."""
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children(folder)},
    }
    llm = engine.make_llm(model, connector=config)
    rounds = []
    for prompts in (first, first, second, second):
        engine.settle(llm)
        engine.reset_local_cache(llm)
        rounds.append(engine.generate(llm, prompts, 4))
    connector = engine.scheduler(llm).connector
    (ours,) = [child for child in connector._connectors if type(child).__name__ == "Type2Connector"]
    engine.settle(llm)
    left = {
        "requests": ours.scheduler.num_tracked_requests,
        "transfers": ours.scheduler.num_transfers,
        "pins": sum(ours.scheduler.store.allocator._pins),
    }
    return rounds, Counter(ours.scheduler.stats.totals()), left


def example_first(folder):
    return [
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
        type2(),
    ]


def example_last(folder):
    return example_first(folder)[::-1]


def type1_first(folder):
    return [type1(), type2()]


def type1_last(folder):
    return [type2(), type1()]


@pytest.mark.parametrize("children", [example_first, example_last, type1_first, type1_last])
def test_f4_f7_beside_another_connector(children, models, tmp_path):
    """Under `MultiConnector` outputs equal a plain engine's whoever loads, and what type2 pinned is given back."""
    first = [prompt(150, 1), prompt(97, 2)]
    second = [one + prompt(60, 3 + number) for number, one in enumerate(first)]
    plain = engines.run(plainly, model=models("llama"), rounds=[first, first, second, second])
    rounds, counts, left = engines.run(
        beside, model=models("llama"), children=children, first=first, second=second, folder=str(tmp_path), timeout=300
    )
    for outputs, expected in zip(rounds, plain, strict=True):
        compare(outputs, expected, atol=CLOSE)
    assert not any(left.values()), left
    if children is not example_first:  # which has what it has, first
        assert counts["prefix_cache_hits"] > 0


def plainly(*, model, rounds):
    """Serve without a connector."""
    llm = engine.make_llm(model)
    return [engine.generate(llm, prompts, 4) for prompts in rounds]
