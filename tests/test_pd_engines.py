"""pd_reuse on real engines: one prefills, another one decodes, and together they answer as one plain engine."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from support import engines
from support import llm as engine
from support.driver import (
    PREFILL,
    Corrupt,
    Generate,
    OneByOne,
    ResetLocal,
    decode,
    deliver,
    drive,
    handed_over,
    pd_reuse,
    prefill,
)
from support.llm import compare
from support.models import model_path
from support.reuse import CLOSE, assert_differ, assert_nothing_left, hits, prompt
from support.valkey import Server, find_binary

pytestmark = pytest.mark.engine

BLOCK = 32

#: Prompts of one token, and around the ends of blocks; the last ones in chunks.
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 300, 430]
SHORT = [1, 31, 32, 33, 97]
CHUNKS = {"max_num_batched_tokens": 100}


def run(script, connector=None, *, runner="v1", model="llama", function=drive, **kwargs):
    return engines.run(
        function, runner=runner, model=model_path(model), script=script, timeout=300, connector=connector, **kwargs
    )


def run_plain(script, **kwargs):
    """Run a script on an engine without a connector; on the first runner, with which the second one agrees."""
    key = repr((script, sorted(kwargs.items())))
    if key not in _plain:
        _plain[key] = run(script, **kwargs).rounds
    return _plain[key]


_plain = {}


def on_disk(folder, **settings):
    return pd_reuse(l2="disk", disk_path=str(folder / "l2"), disk_size="256MiB", **settings)


def assert_handed_over(round_, number, max_tokens):
    """Demand that of each prompt one token was computed, and that this is counted."""
    assert round_.counts["handovers"] == round_.counts["handover_tokens_computed"] == number
    # In vLLM's steps were one token of each prompt, and all but the last one that it generated.
    assert round_.num_scheduled == number * max_tokens


def assert_all_differ(outputs, expected, texts):
    """Demand that each output differs of those whose prompts have more than the token that is computed anyway."""
    for output, wanted, text in zip(outputs, expected, texts, strict=True):
        if len(text) > 1:
            assert_differ([output], [wanted])


@pytest.mark.parametrize(("runner", "lengths"), [("v1", LENGTHS), ("v2", SHORT)])
def test_j5_one_token_is_computed_by_the_decode_engine(runner, lengths, tmp_path):
    """J5: it is the last one, wherever the prompt ends in a block, and whatever the prefill engine has already."""
    prompts = [prompt(length, seed=length) for length in lengths]
    longer = [text + prompt(40, seed=-len(text)) for text in prompts[-2:]]
    texts = prompts + longer
    (plain,) = run_plain([Generate(texts, 4)], **CHUNKS)
    first = run([prefill(prompts), prefill(longer), deliver], on_disk(tmp_path), runner=runner, **CHUNKS)
    cold, warm = first.rounds
    compare([*cold.outputs, *warm.outputs], [output.first(1) for output in plain.outputs], atol=CLOSE)
    reused = [len(text) // BLOCK * BLOCK for text in prompts[-2:]]
    assert cold.num_scheduled == sum(lengths)
    assert warm.num_scheduled == sum(map(len, longer)) - sum(reused)
    assert_nothing_left(first)
    ask = decode(texts, cold.params + warm.params, 4)
    second = run([ask, Corrupt(), ResetLocal(), ask], on_disk(tmp_path), runner=runner, **CHUNKS)
    done, spoilt = second.rounds
    compare(done.outputs, plain.outputs, atol=CLOSE)
    assert_all_differ(spoilt.outputs, plain.outputs, texts)
    for round_ in (done, spoilt):
        assert_handed_over(round_, len(texts), 4)
    blocks = sum(-(-len(text) // BLOCK) for text in texts if len(text) > 1)
    # The longer ones share what they begin with.
    assert done.counts["blocks_loaded"] == spoilt.counts["blocks_loaded"] == blocks
    assert done.counts["l2_blocks_read:disk"] == blocks - sum(reused) // BLOCK
    # Clients are told what the prefill engine had, as vLLM does with its own connectors.
    assert done.cached == [0] * len(prompts) + reused
    assert_nothing_left(second)


#: Runs a pickled script in a new process.
_ALONE = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
from support.driver import drive
from pathlib import Path
Path(sys.argv[3]).write_bytes(pickle.dumps(drive(**pickle.loads(Path(sys.argv[2]).read_bytes()))))
"""


def run_alone(folder, env, **arguments):
    """Run a script in a process that is forked from nothing."""
    arguments_file, result_file = folder / "arguments", folder / "result"
    arguments_file.write_bytes(pickle.dumps(arguments))
    environment = engines.base_environment("v1") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | env
    command = [sys.executable, "-P", "-c", _ALONE, str(engines.TESTS), str(arguments_file), str(result_file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return pickle.loads(result_file.read_bytes())


def test_j6_processes_that_share_a_directory(tmp_path):
    """J6: a prefill process, a directory, a decode process; each hashes strings in its own way."""
    lengths = [2, 31, 32, 33, 64, 65, 200]
    texts = [prompt(length, seed=length) for length in lengths]
    (plain,) = run_plain([OneByOne(texts, 6)])
    connector = on_disk(tmp_path)
    (given,) = run_alone(
        tmp_path,
        {"PYTHONHASHSEED": "4242"},
        model=model_path("llama"),
        connector=connector,
        script=[prefill(texts), deliver],
    ).rounds
    ask = decode(texts, given.params, 6)
    env = {"PYTHONHASHSEED": "7"}
    done, spoilt = run([ask, Corrupt(), ResetLocal(), ask], connector, env=env).rounds
    compare(done.outputs, plain.outputs, atol=CLOSE)
    assert_handed_over(done, len(texts), 6)
    assert_all_differ(spoilt.outputs, plain.outputs, texts)


#: Three prompts of five blocks, and two more each to generate, in a cache of 15 blocks.
SMALL = {"num_gpu_blocks": 16, "max_model_len": 384, **CHUNKS, "enable_prefix_caching": False}


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_preemption_on_both_sides_and_a_second_turn(runner, tmp_path):
    """Prompts are preempted while they are prefilled, and again when they don't fit any more: outputs are equal.

    What the decode engine generated is stored, so that the next turn starts with it on another pair of engines.
    """
    texts = [prompt(156 + i, seed=20 + i) for i in range(3)]
    others = [prompt(90, seed=30), prompt(91, seed=31)]
    tokens = 40
    (plain,) = run_plain([OneByOne([*others, *texts], tokens)])
    # While two requests generate, the cache hasn't room for the prompts that come behind.
    busy = Generate([*others, *texts], tokens, each=[{}, {}, *[handed_over(PREFILL) | {"max_tokens": 1}] * 3])
    first = run(
        [busy, deliver],
        on_disk(tmp_path),
        runner=runner,
        **SMALL | {"num_gpu_blocks": 13, "max_num_batched_tokens": 48, "scheduler_reserve_full_isl": False},
    )
    (given,) = first.rounds
    assert first.preemptions >= 1
    compare(given.outputs[:2], plain.outputs[:2], atol=CLOSE)
    compare(given.outputs[2:], [output.first(1) for output in plain.outputs[2:]], atol=CLOSE)
    assert given.params[:2] == [None, None]
    assert_nothing_left(first)

    ask = decode(texts, given.params[2:], tokens)
    second = run([ask, deliver], on_disk(tmp_path), runner=runner, **SMALL)
    (done,) = second.rounds
    assert second.preemptions >= 1
    compare(done.outputs, plain.outputs[2:], atol=CLOSE)
    assert done.counts["handover_tokens_computed"] == 3
    assert_nothing_left(second)

    longer = [
        text + output.tokens + prompt(20, seed=-i)
        for i, (text, output) in enumerate(zip(texts, done.outputs, strict=True))
    ]
    (plain_longer,) = run_plain([OneByOne(longer, 3)])
    (given,) = run([prefill(longer), deliver], on_disk(tmp_path), runner=runner).rounds
    # All but the last token that was generated have KV, and six blocks are full.
    stored = [(len(text) + tokens - 1) // BLOCK * BLOCK for text in texts]
    assert hits([given]) == [sum(stored)]
    assert given.num_scheduled == sum(map(len, longer)) - sum(stored)
    ask = decode(longer, given.params, 3)
    done, spoilt = run([ask, Corrupt(), ResetLocal(), ask], on_disk(tmp_path), runner=runner).rounds
    compare(done.outputs, plain_longer.outputs, atol=CLOSE)
    assert_handed_over(done, 3, 3)
    assert_all_differ(spoilt.outputs, plain_longer.outputs, longer)


#: A token that ends an answer, and is always the likeliest one.
ENDS_AT_ONCE = {"logit_bias": {257: 100.0}, "ignore_eos": False}


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_kinds_of_requests(runner, tmp_path):
    """D1, D4 and others: adapters and salts keep prompts apart, with anybody's parameters; samples; ends at once."""
    text = prompt(150, seed=11)
    one, other = ({"lora": (i, model_path(f"lora{i}"))} for i in (1, 2))
    mine, theirs = {"salt": "x"}, {"salt": "y"}
    logprobs, two = {"sampling": {"prompt_logprobs": 2}}, {"sampling": {"n": 2, "temperature": 1.0, "seed": 5}}
    ends = {"sampling": ENDS_AT_ONCE}
    args = {"enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False}
    kinds = [one, mine, logprobs, two, ends]
    asked = [*kinds, other, {}]
    # On the same runner: the other one draws other samples.
    plain = run_plain([Generate([text], 4, **kind) for kind in asked], runner=runner, **args)
    first = run([*(prefill([text], **kind) for kind in kinds), deliver], on_disk(tmp_path), runner=runner, **args)
    for ours, expected in zip(first.rounds, plain, strict=False):
        compare(ours.outputs, [output.first(1) for output in expected.outputs], atol=CLOSE)
    params = [round_.params[0] for round_ in first.rounds]
    assert all(params)
    assert_nothing_left(first)

    def go_on(given, sampling=None, **kind):
        return Generate([text], 4, sampling=(sampling or {}) | handed_over(given), **kind)

    steps = [go_on(given, **kind) for given, kind in zip(params, kinds, strict=True)]
    # With parameters that are another's, nothing is loaded, and waited for it is as long as is set.
    steps += [go_on(params[0], **other), go_on(params[0], **theirs), go_on(params[0], **one)]
    impatient = {"handover_timeout": 1, "l2_load_timeout": 1}
    second = run([*steps, Corrupt(), steps[0]], on_disk(tmp_path, **impatient), runner=runner, **args)
    expected = [*plain[:6], plain[6], plain[0]]
    for ours, wanted in zip(second.rounds, expected, strict=False):
        compare(ours.outputs, wanted.outputs, atol=CLOSE)
    computed = [round_.counts["handover_tokens_computed"] for round_ in second.rounds]
    assert computed == [1, 1, 150, 2, 1, 150, 150, 1, 1]
    assert [len(output.tokens) for output in second.rounds[4].outputs] == [1]
    assert_differ(second.rounds[-1].outputs, plain[0].outputs)
    for different in (plain[5], plain[6]):
        assert_differ(different.outputs, plain[0].outputs)
    assert_nothing_left(second)


#: With three letters, texts repeat themselves.
LETTERS = {"allowed_token_ids": [60, 61, 62]}


@pytest.mark.parametrize(
    ("method", "draft"), [("ngram", None), ("eagle", "llama_eagle"), ("draft_model", "llama_noisy")]
)
def test_drafts(method, draft, tmp_path):
    """A decode engine that looks for drafts in the text; EAGLE or a draft model, which have KV of their own, on both.

    The draft model's KV is handed over, too: if it is spoilt, fewer drafts are right. (EAGLE's head here seldom is.)
    """
    texts, sampling = [prompt(64, 64), prompt(54, 54)], {}
    if draft is None:
        texts, sampling = [[60 + token % 3 for token in text] for text in texts], LETTERS
    drafts = {"method": method, "num_speculative_tokens": 3}
    drafts |= {"prompt_lookup_max": 3} if draft is None else {"model": model_path(draft)}
    with_drafts = {"speculative_config": drafts, "env": {"NUMBA_DISABLE_JIT": "1"}}  # compiling takes 6 s
    (plain,) = run_plain([Generate(texts, 22, sampling=sampling)])
    script = [prefill(texts, sampling=sampling), deliver]
    (given,) = run(script, on_disk(tmp_path), **with_drafts if draft else {}).rounds
    ask = decode(texts, given.params, 22, sampling=sampling)
    spoil_drafts = [Corrupt("draft_model"), ResetLocal(), ask] if method == "draft_model" else []
    ours = run([ask, *spoil_drafts, Corrupt(), ResetLocal(), ask], on_disk(tmp_path), **with_drafts)
    done, *others, spoilt = ours.rounds
    for round_ in (done, *others):
        compare(round_.outputs, plain.outputs, atol=CLOSE)
        assert round_.counts["handover_tokens_computed"] == round_.counts["handovers"] == 2
    assert done.drafts["accepted"] < done.drafts["drafted"]
    assert done.drafts["accepted"] > 0 or method == "eagle"
    for round_ in others:
        assert 2 * round_.drafts["accepted"] < done.drafts["accepted"]
    assert_all_differ(spoilt.outputs, plain.outputs, texts)
    assert_nothing_left(ours)


def _mooncake():
    """Return `support.mooncake`, which needs a folder on the path that jobs don't have."""
    if (scripts := str(engines.TESTS.parent / "scripts")) not in sys.path:
        sys.path.append(scripts)
    return importlib.import_module("support.mooncake")


def serve(*, shared_memory=None, **arguments):
    """Run a script with another directory for shared memory, or with what Mooncake's client needs."""
    if shared_memory is None:
        _mooncake().preload()
    else:
        import kvplug_pd_reuse.settings

        kvplug_pd_reuse.settings._SHARED_MEMORY = Path(shared_memory)
    return drive(**arguments)


@pytest.fixture(
    params=[
        "shared memory",
        pytest.param("valkey", marks=pytest.mark.server),
        pytest.param("mooncake", marks=pytest.mark.server),
    ]
)
def store(request, tmp_path):
    """Return the arguments of engines that share a store, and the store's name."""
    with ExitStack() as stack:
        if request.param == "shared memory":
            folder = tempfile.mkdtemp(prefix="kvplug-test-", dir="/dev/shm")
            stack.callback(shutil.rmtree, folder)
            yield {"connector": pd_reuse(), "shared_memory": folder}, "disk"
            assert [path.name for path in Path(folder).iterdir()] == [f"kvplug-pd-{os.getuid()}"]
        elif request.param == "valkey":
            try:
                server = Server(find_binary("valkey"), tmp_path)
            except FileNotFoundError as error:
                pytest.skip(str(error))
            stack.callback(server.kill)
            yield {"connector": pd_reuse(l2="valkey", valkey_url=server.url)}, "valkey"
        else:
            if missing := _mooncake().missing():
                pytest.skip(missing)
            there = stack.enter_context(_mooncake().mooncake_store(64 << 20))
            yield {"connector": pd_reuse(l2="mooncake", mooncake_master=there.address)}, "mooncake"


def test_stores(store):
    """Without settings a directory in shared memory is the store; or it is a Valkey, or a Mooncake Store."""
    arguments, name = store
    texts = [prompt(65, 1), prompt(200, 2)]
    (plain,) = run_plain([Generate(texts, 4)])
    (given,) = run([prefill(texts), deliver], function=serve, **arguments).rounds
    ask = decode(texts, given.params, 4)
    done, spoilt = run([ask, Corrupt(), ResetLocal(), ask], function=serve, **arguments).rounds
    compare(done.outputs, plain.outputs, atol=CLOSE)
    assert_handed_over(done, 2, 4)
    assert done.counts[f"l2_blocks_read:{name}"] == 3 + 7
    assert_all_differ(spoilt.outputs, plain.outputs, texts)


def _spoil(worker):
    """On the second rank only, exchange what is in the slots."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    if worker.rank == 1:
        rows = kv_transfer_state.get_kv_transfer_group().worker._slab.rows
        rows[:16] = rows[:16][::-1].copy()


def _deliver(worker):
    """Wait until all is in the store, and return how many blocks this rank has loaded."""
    import time

    from vllm.distributed.kv_transfer import kv_transfer_state

    ours = kv_transfer_state.get_kv_transfer_group().worker
    for client in ours._executor._clients:
        assert client._calls.drain(time.monotonic() + 60)
    return worker.rank, ours.stats.totals().get("blocks_loaded", 0)


def two_ranks(*, model, connector, script):
    """Run steps on an engine of two ranks; before the last one, exchange blocks of the second rank."""
    import cloudpickle

    from support.driver import keep_answers, perform

    # Workers can't import this file: what they are asked to run travels as code.
    cloudpickle.register_pickle_by_value(sys.modules[_deliver.__module__])
    llm = engine.make_llm(model, connector=connector, tensor_parallel_size=2, num_gpu_blocks=64, max_model_len=512)
    answers = keep_answers(llm)
    outputs = []
    for number, step in enumerate(script):
        if number and number == len(script) - 1:
            llm.collective_rpc(_spoil)
        outputs.append(perform(llm, step))
        engine.settle(llm)
        loaded = llm.collective_rpc(_deliver)
        assert llm.reset_prefix_cache()
    computed = engine.scheduler(llm).connector.scheduler.stats.totals().get("handover_tokens_computed", 0)
    return outputs, [answer.kv_transfer_params for answer in answers], sorted(loaded), computed


def test_j10_two_ranks_and_one(tmp_path):
    """J10, B3: two ranks load what one has stored, one loads what two have, and ranks that differ are noticed.

    An engine that isn't told of the other one's size computes, and says why.
    """
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    texts, others = [prompt(200, 1), prompt(64, 2)], [prompt(150, 3), prompt(33, 4)]
    (plain,), (plain_others,) = run_plain([Generate(texts, 4)]), run_plain([Generate(others, 4)])
    (given,) = run([prefill(others), deliver], on_disk(tmp_path)).rounds
    ask = decode(others, given.params, 4)
    two = {"connector": on_disk(tmp_path, peer_layouts="tp1"), "function": two_ranks, "env": env}
    (first, done, spoilt), params, loaded, computed = run([prefill(texts), ask, ask], **two)
    # Two ranks add up in another order than one.
    compare(first, [output.first(1) for output in plain.outputs], atol=1e-4)
    compare(done, plain_others.outputs, atol=1e-4)
    assert_differ(spoilt, plain_others.outputs, atol=1e-4)
    assert computed == 4
    # Of the first prompt four full blocks and its end, of the second one one and its end; twice.
    assert loaded == [(0, 14), (1, 14)]
    assert [own["tp_size"] for own in params[:2]] == [2, 2]
    ask = decode(texts, params[:2], 4)
    (one,) = run([ask], on_disk(tmp_path, peer_layouts="tp2")).rounds
    compare(one.outputs, plain.outputs, atol=1e-4)
    assert_handed_over(one, 2, 4)
    (alone,) = run([ask], on_disk(tmp_path)).rounds
    compare(alone.outputs, plain.outputs, atol=CLOSE)
    assert alone.counts["handovers_refused:layout"] == 2
    assert alone.counts["handover_tokens_computed"] == 264
