"""Connectors of distributions that know nothing of kvplug, or are broken, on real engines."""

from __future__ import annotations

import os
import random
import sys
import textwrap
import traceback

import pytest

from support import engines
from support import llm as engine
from support.driver import TYPE1, OneByOne, drive
from support.llm import compare
from support.servers import serve

pytestmark = pytest.mark.engine

CLOSE = 1e-5


# -- The distributions -----------------------------------------------------------------------------------------------

PLAIN = """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

    class Metadata(KVConnectorMetadata):
        pass

    class PlainConnector(KVConnectorBase_V1):
        def __init__(self, vllm_config, role, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)
            self.steps = 0

        def start_load_kv(self, forward_context, **kwargs):
            pass

        def wait_for_layer_load(self, layer_name):
            pass

        def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
            pass

        def wait_for_save(self):
            self.steps += 1

        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            return 0, False

        def update_state_after_alloc(self, request, blocks, num_external_tokens):
            pass

        def build_connector_meta(self, scheduler_output):
            self.steps += 1
            return Metadata()
"""

# Written for vLLM before 0.21. It counts its steps in metrics of its own.
OLD = """
    from dataclasses import dataclass

    from prometheus_client import Counter
    from third_party import PlainConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

    @dataclass
    class OldStats(KVConnectorStats):
        def reset(self):
            self.data = {}

        def aggregate(self, other):
            self.data = {"steps": self.data.get("steps", 0) + other.data.get("steps", 0)}
            return self

        def reduce(self):
            return self.data

        def is_empty(self):
            return not self.data

    class OldMetrics(KVConnectorPromMetrics):
        def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
            super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            counter = metric_types[Counter](name="vllm:old_steps", documentation="Steps.", labelnames=labelnames)
            self.steps = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}

        def observe(self, transfer_stats_data, engine_idx=0):
            self.steps[engine_idx].inc(transfer_stats_data["steps"])

    class OldConnector(PlainConnector):
        def __init__(self, vllm_config, role):
            super().__init__(vllm_config, role)
            self.reported = 0

        def get_kv_connector_stats(self):
            grown, self.reported = self.steps - self.reported, self.steps
            return OldStats(data={"steps": grown}) if grown else None

        @classmethod
        def build_kv_connector_stats(cls, data=None):
            return OldStats(data=data or {})

        @classmethod
        def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
            return OldMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
"""

HOOKED = """
    import kvplug
    from third_party import PlainConnector

    class HookedConnector(PlainConnector):
        @kvplug.hookimpl
        def before_update_states(self, step):
            return None
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with distributions that work beside such that can't be imported."""
    folder = tmp_path_factory.mktemp("site")
    _put(folder, "third-party", "1.2", "PlainConnector = third_party:PlainConnector", third_party=PLAIN)
    # Its connector is called otherwise than its class.
    _put(folder, "old-fashioned", "0.3", "old = old_fashioned:OldConnector", old_fashioned=OLD)
    _put(folder, "hooked", "1.0", "HookedConnector = hooked:HookedConnector", hooked=HOOKED)
    _put(folder, "no-client", "2.0", "NoClient = no_client:Connector", no_client="import a_client_that_is_missing")
    _put(folder, "exits", "2.1", "Exits = exits:Connector", exits="raise SystemExit('this needs a licence')")
    return str(folder)


def _put(folder, name, version, entry_point, **modules):
    """Put a distribution where pip would put its parts."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[vllm.kv_connectors]\n{entry_point}\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(textwrap.dedent(source))


# -- Jobs ------------------------------------------------------------------------------------------------------------


def use(site):
    """Have a folder's distributions installed, in this process and those that it starts."""
    sys.path.insert(0, site)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))


def config(name):
    return {"kv_connector": name, "kv_role": "kv_both"}


def prompts():
    return [[random.Random(n).randrange(256) for _ in range(100 + n)] for n in range(2)]


def look(*, site, model, name):
    """Generate with a connector, and say what it is."""
    use(site)
    llm = engine.make_llm(model, connector=config(name))
    outputs = [engine.generate(llm, [prompt], 4)[0] for prompt in prompts()]
    halves = [engine.connector(llm), engine.scheduler(llm).connector]
    from kvplug.dispatch import current_dispatcher

    return {
        "outputs": outputs,
        "classes": {f"{type(half).__module__}.{type(half).__qualname__}" for half in halves},
        "configs": [type(half._kv_cache_config).__name__ for half in halves],
        "steps": [half.steps for half in halves],
        "hooked": [plugin.name for plugin in current_dispatcher().plugins],
    }


def error_of(function, *args, **kwargs):
    """Return an error's class, its message and its traceback; None if there is no error."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - it is what the tests look at
        return type(error).__name__, str(error), "".join(traceback.format_exception(error))
    return None


def ask_for_broken_ones(*, site, model):
    """Ask for two connectors that can't be imported, then for a good one."""
    use(site)
    said = {name: error_of(engine.make_llm, model, connector=config(name)) for name in ("NoClient", "Exits")}
    llm = engine.make_llm(model, connector=config("PlainConnector"))
    return said, [engine.generate(llm, [prompt], 4)[0] for prompt in prompts()]


def refuse_pipelines(*, site, model, name):
    """Create both halves of a connector for an engine with two pipeline stages, as vLLM's factory does."""
    use(site)
    from vllm import EngineArgs
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

    arguments = EngineArgs(model, block_size=32, pipeline_parallel_size=2, kv_transfer_config=config(name))
    vllm_config = arguments.create_engine_config()
    create = KVConnectorFactory.create_connector
    return [error_of(create, vllm_config, role, KVCacheConfig(1, [], [])) for role in KVConnectorRole]


def start_pipeline(*, site, model, name):
    """Start an engine with two pipeline stages."""
    use(site)
    return error_of(engine.make_llm, model, connector=config(name), pipeline_parallel_size=2)


# -- Tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_outputs(models):
    """Return what an engine without a connector generates for `prompts`."""
    return engines.run(drive, model=models("llama"), script=[OneByOne(prompts(), 4)]).rounds[0].outputs


def test_a_plain_connector_is_found_by_name(runner, models, site, plain_outputs):
    """A subclass of vLLM's base class, from a distribution that doesn't know kvplug, serves as it is."""
    seen = engines.run(look, runner=runner, site=site, model=models("llama"), name="PlainConnector")
    compare(seen["outputs"], plain_outputs, atol=CLOSE)
    assert seen["classes"] == {"third_party.PlainConnector"}
    assert seen["configs"] == ["KVCacheConfig", "KVCacheConfig"]
    assert all(steps >= 8 for steps in seen["steps"])
    assert seen["hooked"] == []


def test_f5_a_constructor_of_two_arguments(models, site, plain_outputs):
    """A connector with the old constructor serves, and vLLM's base class gets the KV-cache configuration it demands."""
    seen = engines.run(look, site=site, model=models("llama"), name="old")
    compare(seen["outputs"], plain_outputs, atol=CLOSE)
    assert seen["classes"] == {"old_fashioned.OldConnector"}
    assert seen["configs"] == ["KVCacheConfig", "KVCacheConfig"]
    assert all(steps >= 8 for steps in seen["steps"])


def test_g2_all_of_a_servers_processes_know_the_connectors(models, site, plain_outputs):
    """G1, F5: front end, engine core and two workers resolve the names of a `MultiConnector`'s children.

    The front end does when it takes in their metrics, by class name. One child has the old constructor.
    """
    children = [TYPE1, config("old")]
    connector = config("MultiConnector") | {"kv_connector_extra_config": {"connectors": children}}
    args = ["--tensor-parallel-size", "2"]
    with serve(models("llama"), connector=connector, env={"PYTHONPATH": site}, args=args) as server:
        cold = [server.complete(prompt, 4, return_token_ids=True)["token_ids"] for prompt in prompts()]
        server.get("/metrics")
        server.post("/reset_prefix_cache")
        warm = [server.complete(prompt, 4, return_token_ids=True)["token_ids"] for prompt in prompts()]
        assert cold == warm == [output.tokens for output in plain_outputs]
        assert server.metric("vllm:kvplug_tokens_loaded_total") == 96 + 96
        # 16 steps: no two of scheduler and workers can have counted more than 32.
        assert server.metric("vllm:old_steps_total") > 32
        assert "not registered" not in server.log


def test_g5_broken_ones_stop_nobody_else(models, site, plain_outputs):
    """Who asks for a connector whose module can't be imported is told its own error; the others work beside it."""
    said, outputs = engines.run(ask_for_broken_ones, site=site, model=models("llama"))
    _, message, whole = said["NoClient"]
    assert "'NoClient' of no-client 2.0" in message
    assert "No module named 'a_client_that_is_missing'" in message
    assert "no_client.py" in whole
    _, message, whole = said["Exits"]
    assert "'Exits' of exits 2.1" in message
    assert "SystemExit: this needs a licence" in message
    compare(outputs, plain_outputs, atol=CLOSE)


def test_pipelines_are_refused_for_hooks(models, site):
    """A connector that shortens steps can't be used with pipeline stages, and one sentence says so and what to do."""
    said = engines.run(refuse_pipelines, site=site, model=models("llama"), name="HookedConnector")
    assert len(said) == 2
    for kind, message, _ in said:
        assert kind == "UnsupportedError"
        assert message.startswith("HookedConnector ")
        assert "pipeline parallelism (2)" in message
        assert "use tensor parallelism" in message
        assert len(message.splitlines()) == 1
    assert engines.run(refuse_pipelines, site=site, model=models("llama"), name="PlainConnector") == [None, None]
    _, message, _ = engines.run(start_pipeline, site=site, model=models("llama"), name="HookedConnector")
    assert said[0][1] in message
