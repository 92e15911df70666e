"""The simulator is right about vLLM itself, and notices what connectors do wrong."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from sim_connectors import Corrupting, Failing, Forgetful, HoldsBlocks, Honest, Unpicklable, Wavering

from kvplug.errors import ConfigError
from kvplug.testing import (
    VOCABULARY,
    GroupSpec,
    InvariantError,
    Simulation,
    StuckError,
    WrongKVError,
    generate,
    reference,
)

FULL = (GroupSpec(),)
HYBRID = (GroupSpec(), GroupSpec("sliding", layers=2))
STATES = (GroupSpec(), GroupSpec("mamba", layers=2))


def _prompts(seed, count, shared=40, longest=90):
    rng = random.Random(seed)
    start = [rng.randrange(VOCABULARY) for _ in range(shared)]
    return [
        start[: rng.choice([0, shared // 2, shared])]
        + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))]
        for _ in range(count)
    ]


def _run(simulation, prompts, max_tokens=12):
    """Run all to their end, checked after each step, and compare with what no engine computed."""
    ids = [simulation.add_request(prompt, max_tokens) for prompt in prompts]
    for _ in range(3000):
        if not simulation.busy:
            break
        simulation.step()
        simulation.check()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert simulation.finished[request_id].tokens == generate(prompt, max_tokens)
        assert simulation.finished[request_id].reason == "length"
    return ids


# -- vLLM alone ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("groups", "num_blocks"),
    [
        (FULL, 64),
        (FULL, 36),
        ((GroupSpec("sliding", window=24),), 64),
        (HYBRID, 80),
        ((GroupSpec("mla", head_size=8, dtype="bfloat16"),), 64),
        (STATES, 80),
        ((GroupSpec(), GroupSpec("mamba", mamba_mode="all")), 80),
        ((GroupSpec(heads=2), GroupSpec("sliding", head_size=8, heads=2, layers=3)), 80),
    ],
    ids=["full", "small-pool", "sliding", "hybrid", "mla", "align", "all", "pages"],
)
def test_vllm_alone_generates_what_the_model_does(groups, num_blocks, asynchronous, runner):
    """Chunked prefill, prefix hits and preemption, with every kind of group, on both runners."""
    with Simulation(groups=groups, num_blocks=num_blocks, asynchronous=asynchronous, runner=runner) as simulation:
        _run(simulation, _prompts(1, 10))
        if num_blocks == 36:
            assert simulation.statistics.preemptions > 0


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_hashes_finer_than_blocks(runner):
    """Hits inside a block, with vLLM's copy-on-write, don't confuse the simulation."""
    groups = (GroupSpec(block_size=64), GroupSpec("mamba", block_size=64))
    with Simulation(groups=groups, prefix_match_unit=16, num_blocks=60, runner=runner) as simulation:
        _run(simulation, _prompts(2, 8, shared=100))


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_several_ranks(tensor, pipeline):
    """Each rank has its own layers and heads, and a tensor-parallel peer's values are no substitute."""
    groups = (GroupSpec(heads=2, layers=2), GroupSpec("sliding", heads=2, layers=2))
    with Simulation(groups=groups, tensor_parallel=tensor, pipeline_parallel=pipeline, num_blocks=80) as simulation:
        _run(simulation, _prompts(3, 6))


def test_drafts_right_and_wrong():
    """Accepted drafts save steps; rejected ones leave wrong KV that nobody reads."""
    steps = {}
    for name, accept in {"none": lambda *_: False, "some": lambda _, position: position % 3 > 0, "all": None}.items():
        with Simulation(num_speculative_tokens=3, accept=accept) as simulation:
            _run(simulation, _prompts(4, 6))
            steps[name] = simulation.statistics.steps
    assert steps["none"] > steps["some"] > steps["all"]


def test_prefix_hits_are_counted():
    """A second request with the same prompt computes its last block only; another salt computes all of it."""
    prompt = _prompts(5, 1, longest=90)[0] + [1] * 40
    with Simulation() as simulation:
        simulation.add_request(prompt)
        simulation.drain()
        again, salted = simulation.add_request(prompt), simulation.add_request(prompt, cache_salt="x")
        logprobs = simulation.add_request(prompt, prompt_logprobs=0)
        simulation.drain()
        assert simulation.finished[again].num_cached_tokens == (len(prompt) - 1) // 16 * 16
        assert simulation.finished[salted].num_cached_tokens == 0
        assert simulation.finished[logprobs].num_cached_tokens == 0
        assert simulation.finished[salted].tokens == generate(prompt, 1, cache_salt="x")
        assert simulation.finished[salted].tokens != simulation.finished[again].tokens


@pytest.mark.parametrize("asynchronous", [False, True])
def test_aborts_and_resets(asynchronous):
    """Requests may be aborted, and caches reset, at any time."""
    rng = random.Random(6)
    with Simulation(asynchronous=asynchronous, num_blocks=40) as simulation:
        ids = []
        for _ in range(300):
            if rng.random() < 0.3 and len(simulation.scheduler.requests) < 8:
                ids.append(simulation.add_request(_prompts(rng.random(), 1)[0], rng.randint(1, 20)))
            if rng.random() < 0.05:
                simulation.abort(rng.choice(ids or ["unknown"]))
            if rng.random() < 0.03:
                simulation.reset_prefix_cache(running=rng.random() < 0.5)
            simulation.step()
            simulation.check()
        simulation.drain()
        simulation.check()
        assert {simulation.finished[request_id].reason for request_id in ids} == {"length", "abort"}


def test_adapters_keep_kv_apart():
    """A LoRA adapter's KV is other KV."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("a", 1, "/adapters/a")
    with Simulation() as simulation:
        plain = simulation.add_request([1] * 40, 3)
        adapted = simulation.add_request([1] * 40, 3, lora_request=adapter)
        simulation.drain()
        assert simulation.finished[plain].tokens == generate([1] * 40, 3)
        assert simulation.finished[adapted].tokens == generate([1] * 40, 3, lora_request=adapter)
        assert simulation.finished[adapted].num_cached_tokens == 0


def test_ids_may_be_used_again():
    """A finished request's id names another request later."""
    with Simulation() as simulation:
        for prompt in ([1, 2, 3], [4, 5, 6]):
            simulation.add_request(prompt, 4, request_id="same")
            simulation.drain()
            assert simulation.finished["same"].tokens == generate(prompt, 4)


def test_configurations_that_vllm_does_not_have_are_refused():
    """Each with one sentence that says what to change."""
    with pytest.raises(ConfigError, match="enable_prefix_caching=False"):
        Simulation(groups=(GroupSpec("mamba", mamba_mode="none"),))
    with pytest.raises(ConfigError, match="block size, 16"):
        Simulation(groups=(GroupSpec(), GroupSpec("mamba", block_size=32)))
    with pytest.raises(ConfigError, match="larger blocks"):
        Simulation(groups=(GroupSpec(), GroupSpec("mamba", state_bytes=4096)))
    with pytest.raises(ConfigError, match="needs more blocks"):
        Simulation(num_blocks=20)
    with pytest.raises(ValueError, match="from 0 to 999"), Simulation() as simulation:
        simulation.add_request([VOCABULARY])


# -- Connectors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_an_honest_connector_hits(groups, load_async, asynchronous, runner):
    """What a connector saved comes back, and the promises are on record."""
    with Simulation(
        Honest,
        extra_config={"load_async": load_async},
        groups=groups,
        num_blocks=100,
        asynchronous=asynchronous,
        runner=runner,
    ) as simulation:
        prompts = _prompts(7, 6)
        _run(simulation, prompts)
        assert simulation.reset_prefix_cache()
        before = simulation.statistics.scheduled_tokens
        ids = _run(simulation, prompts)
        assert simulation.statistics.scheduled_tokens - before < before
        assert simulation.statistics.promised_tokens > 0
        assert sum(simulation.finished[request_id].num_external_tokens for request_id in ids) > 0


def _failing(*, load_async, **options):
    return Simulation(
        reference(Failing, {"load_async": load_async}, kv_load_failure_policy="recompute"),
        groups=(GroupSpec(heads=2),),
        **options,
    )


def _run_thrice(simulation):
    prompts = _prompts(7, 6)
    for _ in range(3):
        _run(simulation, prompts)
        assert simulation.reset_prefix_cache()
    assert simulation.statistics.promised_tokens > 0


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(("load_async", "asynchronous"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_load_that_is_known_to_have_failed_is_computed(asynchronous, load_async, runner, tensor):
    """Wrong KV that the connector reports is no error; the tokens of that step are, if anyone gets them."""
    options = {"asynchronous": asynchronous, "runner": runner, "tensor_parallel": tensor}
    with _failing(load_async=load_async, **options) as simulation:
        _run_thrice(simulation)


def test_vllm_gives_away_the_token_after_a_failed_load():
    """Version 0.32 drops the output of the step whose synchronous load failed, but not that of the step in flight."""
    with (
        _failing(load_async=False, asynchronous=True) as simulation,
        pytest.raises(InvariantError, match=r"r7.* at position 56"),
    ):
        _run_thrice(simulation)


def test_vllms_example_connector(tmp_path):
    """A connector that isn't ours, with its files."""
    options = {"shared_storage_path": str(tmp_path)}
    with Simulation("ExampleConnector", extra_config=options, max_num_batched_tokens=512) as simulation:
        prompts = _prompts(10, 3, shared=0)
        _run(simulation, prompts)
        assert simulation.reset_prefix_cache()
        _run(simulation, prompts)
        assert simulation.statistics.promised_tokens > 0


def test_a_long_random_run():
    """Thousands of steps with everything at once: hits, async loads, preemption, aborts, resets, two groups."""
    rng = random.Random(11)
    with Simulation(
        Honest, extra_config={"load_async": True}, groups=HYBRID, num_blocks=70, asynchronous=True, runner="v2"
    ) as simulation:
        pool = _prompts(11, 12, shared=120, longest=120)
        ids = []
        for step in range(2000):
            if rng.random() < 0.4 and len(simulation.scheduler.requests) < 10:
                ids.append(simulation.add_request(rng.choice(pool), rng.randint(1, 30)))
            if ids and rng.random() < 0.02:
                simulation.abort(rng.choice(ids))
            if rng.random() < 0.02:
                simulation.reset_prefix_cache()
            simulation.step()
            simulation.check(contents=step % 10 == 0)
        simulation.drain()
        simulation.check()
        statistics = simulation.statistics
        assert len(ids) > 300
        assert statistics.preemptions > 10
        assert len(statistics.promises) > 50


def test_an_honest_connector_on_several_ranks():
    """Each rank has a worker half of its own, which finds itself by vLLM's configuration and its parallel state."""
    with Simulation(
        Honest, tensor_parallel=2, pipeline_parallel=2, groups=(GroupSpec(heads=2, layers=2),), num_blocks=100
    ) as simulation:
        assert [half.place for half in simulation.worker_connectors] == [(0, 0), (1, 1), (2, 0), (3, 1)]
        assert simulation.connector.handshakes == {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}
        prompts = _prompts(8, 4)
        _run(simulation, prompts)
        assert simulation.reset_prefix_cache()
        _run(simulation, prompts)
        assert simulation.statistics.promised_tokens > 0


def test_children_of_a_multi_connector():
    """Classes of a test work as children too."""
    children = [reference(Honest), reference(Forgetful, {"promise": False})]
    with Simulation("MultiConnector", extra_config={"connectors": children}) as simulation:
        prompts = _prompts(9, 4)
        _run(simulation, prompts)
        assert simulation.reset_prefix_cache()
        _run(simulation, prompts)
        assert simulation.statistics.promised_tokens > 0


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_promise_without_a_load_is_noticed(asynchronous, load_async):
    """Negative control: blocks that were promised and never loaded are wrong KV at the first one."""
    with Simulation(Forgetful, extra_config={"load_async": load_async}, asynchronous=asynchronous) as simulation:
        request_id = simulation.add_request([1] * 40, 4)
        with pytest.raises(WrongKVError, match="all zeros") as caught:
            simulation.drain()
        assert (caught.value.request_id, caught.value.position, caught.value.group) == (request_id, 0, 0)


def test_a_corrupted_block_is_noticed():
    """Negative control: one byte of one running request, and one of a cached block."""
    with Simulation(Corrupting) as simulation:
        simulation.add_request([1] * 40, 20)
        with pytest.raises(WrongKVError, match="position 17"):
            simulation.drain()
    with Simulation() as simulation:
        simulation.add_request([1] * 40, 1)
        simulation.drain()
        simulation.check()
        block = next(block for block in simulation.scheduler.kv_cache_manager.block_pool.blocks if block.block_hash)
        simulation.layers[0].tensor[block.block_id, 0, 3] += 1
        with pytest.raises(WrongKVError, match="prefix cache") as caught:
            simulation.check()
        assert caught.value.block_id == block.block_id


def test_another_ranks_values_are_noticed():
    """Negative control: a connector that mixes the ranks up."""
    with Simulation(
        Honest, extra_config={"mix_ranks": True}, tensor_parallel=2, groups=(GroupSpec(heads=2),)
    ) as simulation:
        prompt = [1] * 60
        _run(simulation, [prompt])
        assert simulation.reset_prefix_cache()
        simulation.add_request(prompt)
        with pytest.raises(WrongKVError, match="other data"):
            simulation.drain()


def test_a_connector_that_never_decides_is_stuck():
    """Negative control: None for ever keeps the engine stepping, and the request waiting."""
    with Simulation(Wavering) as simulation:
        simulation.add_request([1] * 40, 4)
        with pytest.raises(StuckError, match="WAITING"):
            simulation.drain(max_idle_steps=50)
        assert simulation.statistics.empty_steps >= 50


def test_a_block_that_is_never_given_back_is_noticed():
    """Negative control: a connector that holds a block for good."""
    with Simulation(HoldsBlocks) as simulation:
        simulation.add_request([1] * 40, 1)
        simulation.drain()
        with pytest.raises(InvariantError, match="still in use"):
            simulation.check()


def test_metadata_that_cannot_be_pickled_is_noticed():
    """In one process it works, and with processes apart it doesn't."""
    with Simulation(Unpicklable) as simulation:
        _run(simulation, [[1, 2, 3]])
    with Simulation(Unpicklable, isolated=True) as simulation:
        simulation.add_request([1, 2, 3])
        with pytest.raises((TypeError, AttributeError), match="pickle"):
            simulation.drain()


def test_the_pages_example_works():
    """What docs/simulator.md shows finds no fault in a connector that is right, and one in another that isn't."""
    page = Path(__file__).resolve().parents[3] / "docs" / "simulator.md"
    code = re.search(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)[1]
    module = {"__name__": "page"}
    exec(compile(code, str(page), "exec", dont_inherit=True), module)
    statistics = module["try_connector"](Honest, None, 1)
    assert statistics.promised_tokens > 0
    with pytest.raises(WrongKVError):
        module["try_connector"](Forgetful, None, 1)


def test_both_halves_are_shut_down():
    """Once, workers first."""
    with Simulation(Honest) as simulation:
        halves = [*simulation.worker_connectors, simulation.connector]
    simulation.shutdown()
    assert [half.shutdowns for half in halves] == [1, 1]
