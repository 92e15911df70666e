"""Prompts that go from a prefill engine to a decode engine, with vLLM's real scheduler and simulated workers."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from kvplug.testing import GroupSpec, Simulation, generate
from support.random_walk import Faults, use_tier

pytestmark = pytest.mark.engine

BLOCK = 16
KINDS = {
    "full": (GroupSpec(),),
    "window": (GroupSpec(kind="sliding"),),
    "mixed": (GroupSpec(), GroupSpec("sliding", layers=2)),
    "latent": (GroupSpec(kind="mla", layers=2),),
    "state": (GroupSpec(), GroupSpec("mamba", layers=2)),
    "unequal": (GroupSpec(), GroupSpec("sliding", layers=2, block_size=32, head_size=2)),
}
#: What vllm-router sends to a prefill engine.
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def prompt(length, seed=0):
    return [(seed * 31 + token * token + 7 * token) % 250 for token in range(length)]


@pytest.fixture
def engines(monkeypatch):
    """Return what makes engines that share one store, which lasts until the test ends."""
    values = {}
    use_tier(monkeypatch, values, Faults(0, late=0, tier_errors=0))
    monkeypatch.setattr(Faults, "lucky", lambda self, probability: probability > 0.5)  # nothing is forgotten
    with contextlib.ExitStack() as stack:

        def make(kind="full", **options):
            extra = {"l2": "random", "l1_size_per_rank": "4MiB", "model_id": "simulated", "min_reuse_tokens": 1}
            extra |= options.pop("extra", {})
            size = {"num_blocks": 128, "max_num_batched_tokens": 256, "groups": KINDS[kind]} | options
            return stack.enter_context(Simulation("PDReuseConnector", extra_config=extra, **size))

        make.values = values
        yield make


def serve(engine, text, max_tokens=1, *, expected=None, **options):
    """Let a request end, compare with what no engine computed, and return it."""
    name = engine.add_request(text, max_tokens, **options)
    engine.drain(max_idle_steps=3000)
    done = engine.finished[name]
    if expected is not False:
        assert done.tokens == (generate(text, max_tokens) if expected is None else expected)
    return done


def handed_over(prefill, decode, text, max_tokens=4, **options):
    """Let one engine prefill and another one decode, and return both ends."""
    first = serve(prefill, text, kv_transfer_params=dict(PREFILL), expected=False, **options)
    params = first.kv_transfer_params
    assert params["do_remote_prefill"] is True
    return first, serve(decode, text, max_tokens, kv_transfer_params=params, **options)


def counted(engine):
    return engine.connector.scheduler.stats.totals()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 255, 256, 257, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_all_but_one_token_comes_from_the_store(engines, kind, length):
    """J5: whatever the prompt's length, the decode engine computes one token of it, and says so."""
    prefill, decode = engines(kind), engines(kind)
    _, done = handed_over(prefill, decode, prompt(length))
    assert done.num_cached_tokens == done.num_external_tokens
    assert length - done.num_cached_tokens == 1 or length == done.num_cached_tokens
    assert counted(decode)["handover_tokens_computed"] == 1
    assert counted(decode)["handovers"] == 1


def test_the_answer_says_it_in_the_convention(engines):
    """What vLLM's Nixl connector says is there, blank where it means nothing; what is ours is in one object."""
    first = serve(engines(), prompt(40), kv_transfer_params=dict(PREFILL))
    params = first.kv_transfer_params
    assert {key: params[key] for key in ("do_remote_prefill", "do_remote_decode", "remote_block_ids", "tp_size")} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [],
        "tp_size": 1,
    }
    assert (params["remote_host"], params["remote_port"]) == ("", 0)
    assert isinstance(params["remote_engine_id"], str)
    assert params["remote_request_id"] == "r0"
    ours = params["kvplug"]
    assert (ours["version"], ours["num_prompt_tokens"], ours["num_stored_tokens"]) == (1, 40, 40)
    assert len(bytes.fromhex(ours["namespace"])) == 32
    assert set(ours) == {"version", "namespace", "pp_size", "num_prompt_tokens", "num_stored_tokens"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_is_warm_on_both(engines, kind):
    """A decode engine stores what it generates, so the next prompt begins with it on the prefill engine."""
    prefill, decode = engines(kind), engines(kind)
    text = prompt(100)
    _, done = handed_over(prefill, decode, text, 60)
    following = text + done.tokens + prompt(7, seed=5)
    prefill, decode = engines(kind), engines(kind)  # another pair
    first, _ = handed_over(prefill, decode, following)
    # State is stored where steps end, so its blocks are further apart.
    assert first.num_external_tokens >= (96 if kind == "state" else 128)
    assert counted(decode)["handover_tokens_computed"] == 1


def test_blocks_that_only_the_paged_cache_has_are_stored(engines):
    """A prefill engine that has a prefix in its own cache, but not the store, stores it."""
    prefill, decode = engines(), engines()
    text = prompt(100)
    serve(prefill, text)
    engines.values.clear()
    first, done = handed_over(prefill, decode, text + prompt(40, seed=2))
    assert first.num_cached_tokens >= 96
    assert counted(decode)["handover_tokens_computed"] == 1
    assert done.num_external_tokens >= 139


def test_nothing_is_held_for_anybody(engines):
    """J2: when a prefill has ended, its blocks are free, whether anybody asks for them or not."""
    prefill = engines()
    free = prefill.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for seed in range(5):
        serve(prefill, prompt(100, seed), kv_transfer_params=dict(PREFILL))
        assert prefill.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


ODD = [
    {},
    {"do_remote_prefill": "yes"},
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "kvplug": None},
    {"do_remote_prefill": True, "kvplug": []},
    {"do_remote_prefill": True, "kvplug": {}},
    {"do_remote_prefill": True, "kvplug": {"version": 99}},
    {"do_remote_prefill": True, "kvplug": {"version": 1, "namespace": 3, "num_stored_tokens": 1e300}},
    {"do_remote_prefill": True, "kvplug": {"version": 1, "namespace": "00" * 32, "num_stored_tokens": -5}},
    {"do_remote_prefill": 1, "do_remote_decode": None, "remote_block_ids": "x", "remote_port": [], "tp_size": {}},
    {"do_remote_decode": True, "remote_block_ids": {"a": [1]}, "remote_host": 7, "kvplug": {"version": 1}},
    {"remote_block_ids": [[1, 2, 3]], "remote_engine_id": "other", "x" * 1000: "y" * 1000},
]


@pytest.mark.parametrize("kind", ["full", "state"])
@pytest.mark.parametrize("number", range(len(ODD)))
def test_parameters_of_any_shape_are_an_ordinary_request(engines, number, kind):
    """Unknown keys, wrong types, other versions: the tokens are right, and the engine lives."""
    engine = engines(kind, extra={"handover_timeout": 0.02})
    right = "do_remote_decode" not in ODD[number] or kind == "full"
    serve(engine, prompt(50), 1, kv_transfer_params=ODD[number], expected=None if right else False)
    serve(engine, prompt(50), 3)


@pytest.mark.parametrize("stored", [0, 16, 33, 10**9, -1, "33", None, True])
def test_what_the_parameters_say_is_not_believed(engines, stored):
    """Forged counts change how long is waited, not what is loaded."""
    prefill, decode = engines(), engines(extra={"handover_timeout": 0.05})
    text = prompt(90)
    params = serve(prefill, text, kv_transfer_params=dict(PREFILL)).kv_transfer_params
    params["kvplug"]["num_stored_tokens"] = stored
    other = prompt(90, seed=3)
    assert serve(decode, other, 4, kv_transfer_params=params).num_external_tokens == 0
    done = serve(decode, text, 4, kv_transfer_params=params)
    assert counted(decode)["handover_tokens_computed"] == 90 + 1
    assert done.num_external_tokens >= 89


def test_a_tenants_salt_keeps_its_prompts_apart(engines):
    """The same tokens with another salt, with the first one's parameters: nothing is loaded."""
    prefill, decode = engines(), engines(extra={"handover_timeout": 0.05})
    text = prompt(90)
    first = serve(prefill, text, kv_transfer_params=dict(PREFILL), cache_salt="a", expected=False)
    params = first.kv_transfer_params
    done = serve(decode, text, 4, kv_transfer_params=params, cache_salt="b", expected=False)
    assert done.num_external_tokens == 0
    assert serve(decode, text, 4, kv_transfer_params=params, cache_salt="a", expected=False).num_external_tokens >= 89


def test_engines_of_other_models_or_blocks_never_mix(engines):
    """One store, engines with other weights or block sizes: nobody finds another's, and the reason is told."""
    text = prompt(96)
    prefill = engines()
    params = serve(prefill, text, kv_transfer_params=dict(PREFILL)).kv_transfer_params
    others = {
        "weights": engines(extra={"model_id": "other"}),
        "block size": engines(groups=(GroupSpec(block_size=32),)),
        "heads": engines(groups=(GroupSpec(heads=2),)),
        "layers": engines(groups=(GroupSpec(layers=2),)),
    }
    for what, engine in others.items():
        assert serve(engine, text, 4, kv_transfer_params=params).num_external_tokens == 0, what
        # Of the simulated model, nobody says how many there are: the layout of the blocks tells them apart.
        assert what in {"heads", "layers"} or counted(engine).get("handovers_refused:namespace") == 1, what
    assert serve(engines(), text, 4, kv_transfer_params=params).num_external_tokens >= 95


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (4, 4)])
def test_j10_other_sizes_aren_t_waited_for_but_where_they_are_read(engines, sizes):
    """J10: an engine with sizes that aren't named stores under names that aren't looked for: a miss, with a reason."""
    params = serve(engines(), prompt(60), kv_transfer_params=dict(PREFILL)).kv_transfer_params
    params["tp_size"], params["kvplug"]["pp_size"] = sizes
    for named in (False, True):
        layouts = {"peer_layouts": f"tp{sizes[0]}pp{sizes[1]}"} if named else {}
        decode = engines(extra={"handover_timeout": 0.05, **layouts})
        serve(decode, prompt(60, seed=9), 4, kv_transfer_params=params)  # one that isn't in the store
        assert counted(decode).get("handovers_refused:layout", 0) == (not named)
        assert counted(decode).get("handover_timeouts", 0) == named


def test_j6_a_tail_of_other_tokens_is_another(engines):
    """A prompt that ends in zeros, and one that is padded by nobody, aren't mistaken for each other."""
    prefill, decode = engines(), engines(extra={"handover_timeout": 0.02})
    text = prompt(40)
    handed_over(prefill, decode, text)
    for other in ([*text, 0], text + [0] * 8, text[:-1], [*text[:-1], 0], text[:33]):
        _, done = handed_over(engines(), decode, other)
        assert done.num_cached_tokens >= len(other) - 1
    engines.values.clear()
    alone = engines(extra={"handover_timeout": 0.02})
    handed_over(prefill, alone, text)
    assert serve(alone, [*text[:-1], 0], 4).num_external_tokens <= 32


@pytest.fixture
def slow_store(engines, monkeypatch):
    """Let the store take its time for what it is given, and return an event that ends that."""
    import threading

    from support.random_walk import MemoryTier

    opened = threading.Event()
    inner = MemoryTier.put

    def put(self, keys, values, timeout):
        opened.wait(timeout)
        return inner(self, keys, values, timeout)

    monkeypatch.setattr(MemoryTier, "put", put)
    yield opened
    opened.set()


def test_j7_what_comes_late_is_waited_for(engines, slow_store):
    """A prefill that is still being stored: the decode engine waits, and takes all of it."""
    import threading

    prefill, decode = engines(extra={"l2_timeout": 30}), engines(extra={"handover_timeout": 20})
    text = prompt(100)
    name = prefill.add_request(text, 1, kv_transfer_params=dict(PREFILL))
    while prefill.finished[name].reason is None:
        prefill.step()
    threading.Timer(0.3, slow_store.set).start()
    name = decode.add_request(text, 4, kv_transfer_params=prefill.finished[name].kv_transfer_params)
    while decode.finished[name].reason is None:
        decode.step()
        if prefill.busy or prefill.connector.has_pending_push_work():
            prefill.step()
    assert decode.finished[name].tokens == generate(text, 4)
    assert counted(decode)["handover_tokens_computed"] == 1
    assert "handover_timeouts" not in counted(decode)


def test_j7_what_never_comes_is_computed(engines, slow_store):
    """J7: a wait that is bounded by a setting, then the prompt is computed, and it is counted."""
    import time

    prefill, decode = engines(extra={"l2_timeout": 30}), engines(extra={"handover_timeout": 0.3})
    text = prompt(100)
    name = prefill.add_request(text, 1, kv_transfer_params=dict(PREFILL))
    while prefill.finished[name].reason is None:
        prefill.step()
    start = time.monotonic()
    serve(decode, text, 4, kv_transfer_params=prefill.finished[name].kv_transfer_params)
    assert time.monotonic() - start >= 0.3
    assert counted(decode)["handover_tokens_computed"] == 100
    assert counted(decode)["handover_timeouts"] == 1


@pytest.mark.parametrize(("handover", "load"), [(0.2, 5), (0.4, 0.1), (0, 5)])
def test_j7_each_wait_has_its_own_bound(engines, handover, load):
    """What isn't in the store is waited for as long as that setting says, however long reads may take."""
    import time

    decode = engines(extra={"handover_timeout": handover, "l2_load_timeout": load})
    start = time.monotonic()
    serve(decode, prompt(100), 4, kv_transfer_params={"do_remote_prefill": True})
    assert handover <= time.monotonic() - start < handover + 2
    assert counted(decode).get("handover_timeouts", 0) == bool(handover)


@pytest.mark.parametrize("levels", [33, 500])
def test_parameters_that_are_nested_deeply_are_dropped(engines, levels):
    """They would be pickled for the workers, and the engine would die of that: they don't get there."""
    import pickle

    deep = {"do_remote_decode": True}
    for _ in range(levels):
        deep = {"x": deep}
    deep = {"do_remote_decode": True, "kvplug": [deep]}
    engine = engines()
    name = engine.add_request(prompt(40), 1, kv_transfer_params=deep)
    pickle.dumps(engine.scheduler.requests[name].sampling_params)
    engine.drain(max_idle_steps=3000)
    assert engine.finished[name].tokens == generate(prompt(40), 1)
    assert engine.finished[name].kv_transfer_params is None


def test_looking_again_asks_for_little(engines, slow_store):
    """While a request waits, the store is asked for one block now and then, not for the whole prompt each time."""
    prefill, decode = engines(extra={"l2_timeout": 30}), engines(extra={"handover_timeout": 0.5})
    text = prompt(400)
    name = prefill.add_request(text, 1, kv_transfer_params=dict(PREFILL))
    while prefill.finished[name].reason is None:
        prefill.step()
    serve(decode, text, 4, kv_transfer_params=prefill.finished[name].kv_transfer_params)
    (worker_half,) = decode.worker_connectors
    lookups = worker_half.worker.stats.totals()["l2_lookups:random"]
    assert 26 * 2 <= lookups <= 26 * 2 + 30, "the whole prompt twice, then one by one"
