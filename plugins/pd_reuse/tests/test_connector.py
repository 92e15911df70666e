"""The façade that vLLM creates: its names, what it refuses, and what it does with requests that are handed over."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, supports_hma

from kvplug import compat
from kvplug.errors import ConfigError, UnsupportedError
from kvplug.hookspecs import needed_hooks
from kvplug.scheduled import connector as module
from kvplug.scheduled.metadata import SlabHandshake
from kvplug_pd_reuse.connector import PDReuseConnector
from kvplug_pd_reuse.settings import PDReuseSettings

BLOCK, BLOCKS, WIDTH = 4, 12, 64
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE = {"do_remote_prefill": True, "do_remote_decode": False}


def spec(name="FullAttentionSpec", **fields):
    from vllm.v1 import kv_cache_interface

    arguments = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": WIDTH, "dtype": torch.float32, **fields}
    return getattr(kv_cache_interface, name)(**arguments)


def mamba():
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))


def kv_cache(*specs):
    made = [SimpleNamespace(layer_names=[f"layer.{n}"], kv_cache_spec=one) for n, one in enumerate(specs or (spec(),))]
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=made)


def config(*, role="kv_both", parallel=None, **extra):
    sizes = {
        "local_world_size": 1,
        "data_parallel_size_local": 1,
        "distributed_executor_backend": None,
        "world_size": 1,
        "rank": 0,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"l1_size_per_rank": "1MiB", "min_reuse_tokens": 1, **extra},
            kv_role=role,
            kv_load_failure_policy="fail",
            engine_id="engine-7",
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(**sizes | (parallel or {})),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )


@pytest.fixture(autouse=True)
def _without_a_model(monkeypatch, tmp_path):
    """A fingerprint needs a whole model's configuration; the store is in a folder that goes away."""
    monkeypatch.setattr(module, "namespace_fingerprint", lambda *_args, **_kwargs: bytes(32))
    monkeypatch.setattr(module, "shard_id", lambda *_args: "all")
    monkeypatch.setenv("KVPLUG_DISK_PATH", str(tmp_path))


def scheduler_half(*specs, slots=True, parallel=None, **settings):
    made = PDReuseConnector(config(parallel=parallel, **settings), KVConnectorRole.SCHEDULER, kv_cache(*specs))
    if slots:
        made.scheduler.set_slab(SlabHandshake(32, 1024))
    return made


def request(tokens=range(9), params=None, *, max_tokens=1, **fields):
    """Make vLLM's own Request."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    extra = None if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(max_tokens=max_tokens, extra_args=extra, **fields)
    return Request("r", list(tokens), sampling, None)


def ended(one, status="FINISHED_LENGTH_CAPPED"):
    from vllm.v1.request import RequestStatus

    one.status = getattr(RequestStatus, status)
    return one


def computed(connector, one, blocks=(1, 2, 3)):
    """Let a request be looked up, admitted and computed in one step."""
    connector.get_num_new_matched_tokens(one, 0)
    tables = tuple(list(blocks) for _ in connector.scheduler.groups)
    connector.update_state_after_alloc(one, SimpleNamespace(get_block_ids=lambda: tables), 0)
    new = SimpleNamespace(
        req_id=one.request_id,
        num_computed_tokens=0,
        block_ids=tables,
        sampling_params=one.sampling_params,
        pooling_params=None,
        prompt_token_ids=one.prompt_token_ids,
        prompt_embeds=None,
    )
    number = len(one.all_token_ids)
    return connector.build_connector_meta(
        SimpleNamespace(
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
            ),
            num_scheduled_tokens={one.request_id: number},
            total_num_scheduled_tokens=number,
            scheduled_spec_decode_tokens={},
            finished_req_ids=set(),
            preempted_req_ids=None,
            has_sync_kv_loads=False,
        )
    )


# -- What it declares --------------------------------------------------------------------------------------------------


def test_f5_names_that_vllm_knows_it_by():
    """F5: its own, and the one that AIBrix users have; both are it, with vLLM's constructor."""
    import importlib_metadata

    names = {
        entry_point.name: entry_point.load()
        for entry_point in importlib_metadata.entry_points(group="vllm.kv_connectors")
        if entry_point.dist.name == "kvplug-pd-reuse"
    }
    assert names == {"PDReuseConnector": PDReuseConnector, "AIBrixPDReuseConnector": PDReuseConnector}
    assert list(inspect.signature(PDReuseConnector).parameters) == ["vllm_config", "role", "kv_cache_config"]


def test_every_abstract_method_is_there():
    """Nothing is missing, arguments are vLLM's, no hook is needed, and several KV-cache groups are taken."""
    assert not PDReuseConnector.__abstractmethods__
    for name in set(vars(PDReuseConnector)) & set(vars(KVConnectorBase_V1)):
        own, base = getattr(PDReuseConnector, name), getattr(KVConnectorBase_V1, name)
        if inspect.isroutine(own) and not name.startswith("_"):
            assert list(inspect.signature(own).parameters)[1:] == list(inspect.signature(base).parameters)[1:], name
    assert needed_hooks(PDReuseConnector) == frozenset()
    assert supports_hma(PDReuseConnector)


def test_f4_under_a_multi_connector():
    """F4: a MultiConnector passes on all that it overrides, new requests too, and stays with several groups."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    own = {
        name
        for cls in PDReuseConnector.__mro__[: PDReuseConnector.__mro__.index(KVConnectorBase_V1)]
        for name in vars(cls)
        if not name.startswith("_")
    } & set(dir(KVConnectorBase_V1))
    assert {"on_new_request", "request_finished", "has_pending_push_work"} <= own
    own |= {"request_finished_all_groups"}
    assert {name for name in own if name not in vars(MultiConnector)} == set()
    child = {
        "kv_connector": "PDReuseConnector",
        "kv_connector_module_path": "kvplug_pd_reuse.connector",
        "kv_role": "kv_both",
    }
    extra = {"connectors": [child, {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_both"}]}
    both = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    assert KVConnectorFactory.supports_hma_config(KVTransferConfig(**child))
    assert KVConnectorFactory.supports_hma_config(both)


def test_f4_a_multi_connector_passes_a_childs_answer_on():
    """F4: as a child, its parameters are those of the MultiConnector's answer, and its prompts are shortened."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    child = scheduler_half(spec(), mamba())
    silent = SimpleNamespace(
        on_new_request=lambda _: None, request_finished_all_groups=lambda _one, _blocks: (False, None)
    )
    multi = MultiConnector.__new__(MultiConnector)
    multi._connectors = [silent, child]
    multi._requests_to_connector, multi._extra_async_saves, multi._all_support_hma = {}, {}, True
    one = request(range(9), dict(PREFILL))
    multi.on_new_request(one)
    assert one.num_prompt_tokens == 8
    computed(child, one)
    delayed, params = multi.request_finished_all_groups(ended(one), ([], []))
    assert not delayed
    assert params["do_remote_prefill"] is True
    assert params["kvplug"]["num_stored_tokens"] == 8


# -- What it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_j1_every_role_is_taken_and_means_the_same(role):
    """J1: an engine is what its requests make of it, whatever `kv_role` says."""
    for half in KVConnectorRole:
        made = PDReuseConnector(config(role=role), half, kv_cache())
        made.shutdown()
    made = PDReuseConnector(config(role=role), KVConnectorRole.SCHEDULER, kv_cache())
    made.scheduler.set_slab(SlabHandshake(32, 1024))
    one = request(range(9), dict(PREFILL))
    assert computed(made, one).saves
    assert made.request_finished(ended(one), [])[1]["kvplug"]["num_stored_tokens"] == 9


def test_another_role_is_refused():
    """The control: vLLM has three."""
    with pytest.raises(UnsupportedError, match="kv_role"):
        PDReuseConnector(config(role="kv_other"), KVConnectorRole.SCHEDULER, kv_cache())


def test_vllm_below_0_18_1_is_refused(monkeypatch):
    """Workers can't report there."""
    monkeypatch.setattr(compat, "worker_metadata_class", lambda: None)
    for half in KVConnectorRole:
        with pytest.raises(UnsupportedError, match=r"PDReuseConnector needs vLLM 0\.18\.1 or newer"):
            PDReuseConnector(config(), half, kv_cache())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"l2_write_policy": "hits"}, "l2_write_policy.*a prefill engine has to store everything"),
        ({"handover_timeout": -1}, "handover_timeout"),
        ({"min_reuse_tokens": 0}, "min_reuse_tokens"),
        ({"max_parked_requests": 0}, "max_parked_requests"),
        ({"handover_timout": 1}, "handover_timout"),
    ],
)
def test_settings_that_cannot_work_are_errors(settings, message):
    """Misspelt, or out of range, or such that a decode engine would wait in vain."""
    with pytest.raises(ConfigError, match=message):
        scheduler_half(**settings)


# -- J12: optional clients ---------------------------------------------------------------------------------------------

IMPORT = """
import sys
for name in ("mooncake", "valkey", "redis", "lmcache", "nixl", "vllm_router", "blake3", "zstandard"):
    sys.modules[name] = None  # as if it weren't installed
from kvplug_pd_reuse.connector import PDReuseConnector
from kvplug_pd_reuse.settings import PDReuseSettings
print(PDReuseConnector.__name__, PDReuseSettings.load({"l1_size_per_rank": "1MiB"}).l2)
"""


@pytest.mark.engine
def test_j12_importing_needs_none_of_the_optional_clients():
    """J12: without any of them the connector is imported, and has its default store."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False, timeout=300, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:1] == ["PDReuseConnector"]


def test_j12_a_missing_client_is_one_line_with_the_pip_command(monkeypatch):
    """J12: who chooses a tier without its client is told what to install, when the worker starts."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    made = PDReuseConnector(config(l2="mooncake", mooncake_master="127.0.0.1:1"), KVConnectorRole.WORKER, kv_cache())
    try:
        with pytest.raises(ConfigError, match=r"^[^\n]*pip install 'kvplug\[mooncake\]'$"):
            made.register_kv_caches({"layer.0": torch.zeros(BLOCKS, 2, BLOCK, WIDTH)})
    finally:
        made.shutdown()


def test_j12_a_tier_that_isnt_installed_is_named():
    """J12: a setting that names no tier at all is an error at once, with those that there are."""
    with pytest.raises(ConfigError, match=r"nowhere.*set l2 to one of disk, mooncake, valkey"):
        PDReuseSettings.load({"l2": "nowhere"}, {})


# -- Requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "params", "max_tokens", "left"),
    [
        ((spec, mamba), PREFILL, 1, 8),
        ((spec,), PREFILL, 1, 9),
        ((spec, mamba), DECODE, 1, 9),
        ((spec, mamba), None, 1, 9),
        ((spec, mamba), {}, 1, 9),
        ((spec, mamba), PREFILL | DECODE | {"do_remote_decode": True}, 1, 9),
        ((spec, mamba), PREFILL, 2, 9),
        ((spec, mamba), {"do_remote_decode": "yes"}, 1, 9),
    ],
)
def test_only_prefills_of_recurrent_models_are_shortened(specs, params, max_tokens, left):
    """A decode engine takes the last token into the state itself; all other requests stay as they are."""
    connector = scheduler_half(*(one() for one in specs))
    one = request(range(9), params and dict(params), max_tokens=max_tokens)
    connector.on_new_request(one)
    assert one.num_prompt_tokens == len(one.prompt_token_ids) == len(one.all_token_ids) == left


def test_a_shortened_prompt_is_stored_to_its_new_end():
    """J5: what is stored is what a decode engine can load of the whole prompt, and what the answer says."""
    connector = scheduler_half(spec(), mamba())
    one = request(range(10), dict(PREFILL))
    connector.on_new_request(one)
    computed(connector, one)
    tracked = connector.scheduler._tracked["r"]
    assert (tracked.save_tail_at, tracked.tail_saved) == (9, True)
    params = connector.request_finished_all_groups(ended(one), ([], []))[1]
    assert params["kvplug"]["num_stored_tokens"] == 9
    assert connector.scheduler._shortened == set()
    # The next one under this id isn't taken to be shortened.
    other = request(range(10), dict(PREFILL), max_tokens=2)
    connector.on_new_request(other)
    connector.get_num_new_matched_tokens(other, 0)
    assert connector.scheduler._tracked["r"].save_tail_at == 9


@pytest.mark.parametrize("form", ["request_finished", "request_finished_all_groups"])
@pytest.mark.parametrize(
    ("status", "answered"),
    [
        ("FINISHED_LENGTH_CAPPED", True),
        ("FINISHED_STOPPED", True),
        ("FINISHED_ABORTED", False),
        ("FINISHED_IGNORED", False),
        ("FINISHED_ERROR", False),
    ],
)
def test_only_a_prefill_that_ended_as_it_should_is_answered(form, status, answered):
    """An aborted or failed one has no parameters; in either form nothing is held for anybody."""
    connector = scheduler_half(parallel={"tensor_parallel_size": 2, "world_size": 2})
    one = request(range(9), dict(PREFILL))
    computed(connector, one)
    delayed, params = getattr(connector, form)(ended(one, status), [])
    assert delayed is False
    if not answered:
        assert params is None
    else:
        assert (params["remote_engine_id"], params["tp_size"], params["remote_request_id"]) == ("engine-7", 2, "r")
        assert params["kvplug"]["namespace"] == "00" * 32
        assert (params["kvplug"]["num_prompt_tokens"], params["kvplug"]["num_stored_tokens"]) == (9, 9)
    assert connector.scheduler.num_tracked_requests == 0
    assert getattr(connector, form)(one, []) == (False, None)


@pytest.mark.parametrize("params", [None, {}, DECODE, {"do_remote_decode": False}, PREFILL | DECODE])
def test_other_requests_have_no_parameters(params):
    """Those of decode engines, and any others."""
    connector = scheduler_half()
    one = request(range(9), params and dict(params))
    computed(connector, one)
    assert connector.request_finished(ended(one), []) == (False, None)


def test_what_isnt_stored_isnt_promised():
    """Before the workers have told of their slabs, for prompts that weren't computed, or while L2 is down: 0 tokens."""

    def stored(connector, *, compute=True, **fields):
        one = request(range(9), dict(PREFILL), **fields)
        if compute:
            computed(connector, one)
        else:
            connector.get_num_new_matched_tokens(one, 0)
        return connector.request_finished(ended(one), [])[1]["kvplug"]["num_stored_tokens"]

    assert stored(scheduler_half()) == 9
    assert stored(scheduler_half(slots=False)) == 0
    assert stored(scheduler_half(), compute=False) == 0
    down = scheduler_half()
    down.scheduler.store._director.down = frozenset({"disk"})
    assert stored(down) == 0
