"""type1 over real L2 tiers that engines share, that fail while an engine runs, and that two ranks write to."""

from __future__ import annotations

import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from support import engines
from support import llm as engine
from support.driver import Generate, OneByOne, drive, type1
from support.l2_steps import Gauges, Held, Killed, Meet, SwapValues, dont_check, fill_disk, forget, recovered
from support.llm import compare
from support.valkey import Server, find_binary

pytestmark = pytest.mark.engine

BLOCK = 32
CLOSE = 1e-5
LENGTHS = [330, 200, 97]


def prompt(length):
    rng = random.Random(length)
    return [rng.randrange(256) for _ in range(length)]


PROMPTS = [prompt(length) for length in LENGTHS]
WHOLE = sum(length // BLOCK * BLOCK for length in LENGTHS)
ASK = OneByOne(PROMPTS, 4)
#: Nothing times out, however busy the machine is.
PATIENT = {"l2_load_timeout": 30, "l2_timeout": 60}


def on_disk(folder):
    """Return the files in a folder that can be a block's."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 14]


@pytest.fixture(scope="module")
def plain(models):
    """Return what an engine without a connector answers."""
    return engines.run(drive, model=models("llama"), script=[ASK], timeout=300).rounds[0].outputs


@pytest.fixture(scope="module")
def valkey():
    """Return the Valkey server to start."""
    try:
        return find_binary("valkey")
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.server
def test_engines_that_share_a_valkey(models, plain, valkey, tmp_path):
    """The second engine on a Valkey starts warm; other values there are misses; the control uses them and errs.

    A third engine, of another namespace, finds nothing of what both have stored.
    """
    with ExitStack() as stack:
        server = Server(valkey, tmp_path)
        stack.callback(server.kill)

        def run(script, **settings):
            connector = type1(l2="valkey", valkey_url=server.url, **PATIENT, **settings)
            return engines.run(drive, model=models("llama"), connector=connector, script=script, timeout=300).rounds

        (cold,) = run([ASK])
        warm, spoiled, unchecked = run(
            [ASK, SwapValues(server.port), forget, ASK, SwapValues(server.port), dont_check, forget, ASK]
        )
        (stranger,) = run([ASK], l2_namespace="another")
    for each in (cold, warm, spoiled, stranger):
        compare(each.outputs, plain, atol=CLOSE)
    assert [each.counts["tokens_loaded"] for each in (cold, warm, spoiled, unchecked, stranger)] == [
        0,
        WHOLE,
        0,
        WHOLE,
        0,
    ]
    assert cold.counts["l2_blocks_written:valkey"] == WHOLE // BLOCK
    assert warm.counts["l2_blocks_read:valkey"] == WHOLE // BLOCK
    assert spoiled.counts["l2_damaged:valkey"] >= len(PROMPTS)
    with pytest.raises(AssertionError, match="request"):
        compare(unchecked.outputs, plain, atol=CLOSE)


@pytest.mark.server
def test_two_engines_at_once_on_a_valkey(models, plain, valkey, tmp_path):
    """Two engines serve at the same time, one on each model runner; each loads what the other has stored just now."""
    halves = [PROMPTS[:1], PROMPTS[1:]]
    with ExitStack() as stack:
        server = Server(valkey, tmp_path)
        stack.callback(server.kill)
        connector = type1(l2="valkey", valkey_url=server.url, **PATIENT)

        def run(index):
            own, other = halves[index], halves[1 - index]
            meet = Meet(tmp_path / f"met-{index}", tmp_path / f"met-{1 - index}")
            script = [OneByOne(own, 4), meet, OneByOne(other, 4)]
            runner = ("v1", "v2")[index]
            return engines.run(
                drive, runner=runner, model=models("llama"), connector=connector, script=script, timeout=300
            ).rounds

        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(run, range(2)))
    answers = [plain[:1], plain[1:]]
    for index, (stored, loaded) in enumerate(both):
        compare(stored.outputs, answers[index], atol=CLOSE)
        compare(loaded.outputs, answers[1 - index], atol=CLOSE)
        with pytest.raises(AssertionError):
            compare(loaded.outputs, answers[index], atol=CLOSE)
        there = sum(len(prompt) // BLOCK for prompt in halves[1 - index])
        assert stored.counts["tokens_loaded"] == 0
        assert loaded.counts["tokens_loaded"] == there * BLOCK
        assert loaded.counts["l2_blocks_read:valkey"] == there


def over_valkey(*, binary, folder, script, **kwargs):
    """Job: an engine over a Valkey of its own, to which the strings of the script are done. Returns what was noted."""
    gauges, held = Gauges(), Held()
    with ExitStack() as stack:
        server = Server(binary, Path(folder))
        stack.callback(server.kill)
        steps = {
            "stop": server.pause,
            "go on": server.resume,
            "kill": server.kill,
            "start": server.start,
            "restart": server.restart,
        }
        steps = {name: (lambda _llm, do=do: do()) for name, do in steps.items()} | {"look": gauges, "count": held}
        connector = type1(l2="valkey", valkey_url=server.url, l2_load_timeout=1.0, l2_timeout=1.0)
        script = [steps.get(step, step) if isinstance(step, str) else step for step in script]
        rounds = drive(script=script, connector=connector, **kwargs).rounds
        stack.callback(server.resume)
    return rounds, gauges.seen, held.seen


@pytest.mark.server
def test_i7_a_valkey_that_stops_dies_and_comes_back(models, plain, valkey, tmp_path):
    """I7: over all of it answers are as without a connector, metrics tell, nothing leaks, and hits come back.

    The server is stopped with SIGSTOP, killed, and restarted between two requests, when only its connections die.
    """
    script = [
        *(ASK, forget, ASK, "count", "look"),
        *("stop", forget, ASK, "look", "go on", recovered, forget, ASK, "look"),
        *("kill", forget, ASK, "look", "start", recovered, forget, ASK, forget, ASK, "look"),
        *("restart", forget, ASK, forget, ASK, "count"),
    ]
    rounds, gauges, held = engines.run(
        over_valkey, binary=valkey, folder=str(tmp_path), model=models("llama"), script=script, timeout=300
    )
    for each in rounds:
        compare(each.outputs, plain, atol=CLOSE)
    cold, hit, stopped, went_on, killed, empty, full, restarted, last = (each.counts for each in rounds)
    assert [each["tokens_loaded"] for each in (hit, went_on, full, last)] == [WHOLE] * 4
    assert [each["tokens_loaded"] for each in (cold, stopped, killed, empty, restarted)] == [0] * 5
    assert stopped["l2_timeouts:valkey"] >= 3
    assert killed["l2_errors:valkey"] >= 3
    # From the third failure on it is left alone.
    assert [each["l2_down:valkey"] for each in gauges] == [0, 1, 0, 1, 0]
    assert min(each["l2_skipped:valkey"] for each in (stopped, killed)) > 0
    assert restarted["l2_errors:valkey"] == 0, "each connection is replaced without an error"
    assert sum(each["load_errors"] + each["save_errors"] for each in (stopped, killed, restarted)) == 0
    assert held[1] <= held[0]


def over_disk(*, folder, script, **kwargs):
    """Job: an engine over a directory, to which the strings of the script are done. Returns what was noted."""
    room = []
    steps = {
        "remove": lambda _llm: shutil.rmtree(folder),
        "fill": lambda _llm: room.append(fill_disk()),
        "make room": lambda _llm: room.pop()(),
        "count": (held := Held()),
    }
    connector = type1(l2="disk", disk_path=folder, disk_size="256MiB", **PATIENT)
    script = [steps[step] if isinstance(step, str) else step for step in script]
    return drive(script=script, connector=connector, **kwargs).rounds, held.seen


def test_a_directory_that_vanishes_and_fills_up(models, plain, tmp_path):
    """While L2's directory is gone, or has no room, answers are as without a connector; afterwards hits come back."""
    script = [
        *(ASK, forget, ASK, "count", "remove", forget, ASK, forget, ASK),
        *("remove", "fill", forget, ASK, forget, ASK, "make room", recovered, forget, ASK, forget, ASK, "count"),
    ]
    rounds, held = engines.run(
        over_disk, folder=str(tmp_path / "l2"), model=models("llama"), script=script, timeout=300
    )
    for each in rounds:
        compare(each.outputs, plain, atol=CLOSE)
    cold, hit, gone, again, filled, still, room, last = (each.counts for each in rounds)
    assert [each["tokens_loaded"] for each in (hit, again, last)] == [WHOLE] * 3
    assert [each["tokens_loaded"] for each in (cold, gone, filled, still, room)] == [0] * 5
    assert min(each["l2_writes_refused:disk"] for each in (filled, still)) == WHOLE // BLOCK
    assert sum(each["load_errors"] + each["save_errors"] for each in (gone, filled)) == 0
    assert held[1] <= held[0]


def test_i1_nothing_is_left_of_engines_that_were_killed(models, plain, tmp_path):
    """I1: after kill -9 during writes, five times, /dev/shm has nothing of theirs, and the directory whole values only.

    The next engine starts warm on what they have left.
    """
    folder, note = tmp_path / "l2", tmp_path / "note"
    connector = type1(l2="disk", disk_path=str(folder), disk_size="256MiB", **PATIENT)
    kwargs = {"model": models("llama"), "connector": connector, "timeout": 300}
    prompts = [prompt(300 + turn) for turn in range(5)]
    for one in prompts:
        with pytest.raises(engines.JobError, match="signal SIGKILL"):
            engines.run(drive, script=[Generate([one], 2), Killed(str(note))], **kwargs)
        assert [name for name in note.read_text().splitlines() if Path(name).exists()] == []
        note.unlink()
    values = len(on_disk(folder))
    rounds = engines.run(drive, script=[OneByOne(prompts, 2), forget, ASK, forget, ASK], **kwargs).rounds
    assert 0 < rounds[0].counts["l2_blocks_read:disk"] <= values
    assert [each.counts["l2_damaged:disk"] for each in rounds] == [0, 0, 0]
    compare(rounds[2].outputs, plain, atol=CLOSE)
    assert rounds[2].counts["tokens_loaded"] == WHOLE
    assert len(on_disk(folder)) == sum(len(one) // BLOCK for one in (*prompts, *PROMPTS))


def _tokens_loaded(worker):
    from vllm.distributed.kv_transfer import kv_transfer_state

    return worker.rank, kv_transfer_state.get_kv_transfer_group().worker.stats.totals().get("tokens_loaded", 0)


def two_ranks(*, prompts, **kwargs):
    """Job: generate on two ranks; return the outputs, and the tokens that each rank has loaded."""
    import cloudpickle

    # Workers can't import this file: what they are asked to run travels as code.
    cloudpickle.register_pickle_by_value(sys.modules[_tokens_loaded.__module__])
    llm = engine.make_llm(tensor_parallel_size=2, num_gpu_blocks=64, max_model_len=512, **kwargs)
    outputs = [engine.generate(llm, [prompt], 4)[0] for prompt in prompts]
    loaded = [tokens for _, tokens in sorted(llm.collective_rpc(_tokens_loaded))]
    llm.llm_engine.engine_core.shutdown()  # what is on its way to L2 is written
    return outputs, loaded


def test_two_ranks_share_a_directory(models, plain, tmp_path):
    """TP=2: each rank keeps its own part of each block, and a new engine's ranks find all of them."""
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    connector = type1(l2="disk", disk_path=str(tmp_path), disk_size="256MiB", **PATIENT)
    kwargs = {"model": models("llama"), "prompts": PROMPTS, "connector": connector, "env": env, "timeout": 600}
    cold, cold_loaded = engines.run(two_ranks, **kwargs)
    files = on_disk(tmp_path)
    warm, warm_loaded = engines.run(two_ranks, **kwargs)
    compare(cold, plain, atol=1e-4)  # sums are split between the ranks
    compare(warm, cold, atol=CLOSE)
    assert [cold_loaded, warm_loaded] == [[0, 0], [WHOLE, WHOLE]]
    assert len(files) == 2 * WHOLE // BLOCK
