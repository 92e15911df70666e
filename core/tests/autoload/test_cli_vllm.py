"""The commands on the vLLM that is installed, with connectors of each kind."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.engine

HOOKED = """
import kvplug
@kvplug.hookimpl
def before_update_states(self, step): return None
"""
SETTINGS = """
from kvplug.settings import Settings as Base
class Settings(Base):
    env_prefix = "THIRD_"
    depth: int = 2
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory, make_distribution, connector_source):
    """A folder with a good, a noisy, a broken, an abstract and a crashing connector."""
    folder = tmp_path_factory.mktemp("world")

    def make(name, cls, source):
        make_distribution(folder, name, {cls: f"{name}_conn:{cls}"}, {f"{name}_conn.py": source})

    make(
        "good", "Good", "print('noise')\nimport os; os.write(1, b'kvplug-probe: nonsense')\n" + connector_source("Good")
    )
    make("third", "Third", connector_source("Third", HOOKED, SETTINGS))
    make("needs", "Needs", "import no_such_client_library\n")
    make("crash", "Crash", "import os; os.abort()\n")
    make("half", "Half", connector_source("Half").replace("def wait_for_save", "def something_else"))
    return folder


def _doctor(run_python, folder, *arguments, environ=None):
    path = [] if folder is None else [folder]
    done = run_python(["-m", "kvplug.cli", "doctor", "--json", *arguments], path=path, environ=environ)
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is (done.returncode == 0)
    return told


def _texts(told, status):
    return [f"{finding['text']} {finding['remedy']}" for finding in told["findings"] if finding["status"] == status]


def test_g12_list_loads_what_it_lists(world, run_python):
    """Hooks are those of the classes; what can't be loaded is marked, also where its import ends the process."""
    done = run_python(["-m", "kvplug.cli", "list", "--json"], path=[world])
    listed = json.loads(done.stdout)
    rows = {row["name"]: row for row in listed["connectors"]}
    assert rows["Type1Connector"]["needs_hook"] is True
    assert (rows["Good"]["needs_hook"], rows["Good"]["error"]) == (False, None)
    assert rows["Third"]["hooks"] == ["before_update_states"]
    assert "no_such_client_library" in rows["Needs"]["error"]
    assert "SIGABRT" in rows["Crash"]["error"]
    assert "wait_for_save" in rows["Half"]["error"]
    assert {"NixlConnector", "MultiConnector"} <= set(listed["vllm"]["connectors"])
    assert not {"Good", "Type1Connector"} & set(listed["vllm"]["connectors"])
    assert listed["error"] is None


def test_doctor_on_an_installation_that_works(run_python):
    """Nothing is wrong: the runner is told, and the hook is live in it."""
    told = _doctor(run_python, None)
    assert told["ok"] is True, _texts(told, "problem")
    assert told["summary"].startswith("OK")
    assert told["runner"] == "v1"  # vLLM's CPU build has no Triton
    assert told["hook"]["v1"] == "import"
    assert told["vllm"]["distributions"][0][0].startswith("vllm")
    assert "values" in told["settings"]["kvplug_type1.connector:Type1Connector"]


def test_doctor_checks_a_config(world, run_python):
    """Only the config's connectors count: good ones, and some that are wrong, each in its way."""
    children = [
        {"kv_connector": "Good", "kv_role": "kv_both"},
        {"kv_connector": "Third", "kv_role": "kv_both", "kv_connector_extra_config": {"dept": 3}},
        {"kv_connector": "Type1Conector", "kv_role": "kv_both"},
        {"kv_connector": "Needs", "kv_role": "kv_both"},
        {"kv_connector": "Crash", "kv_role": "kv_both"},
        {"kv_connector": "Good"},
        "Good",
    ]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    told = _doctor(run_python, world, "--kv-transfer-config", json.dumps(config))
    checks = {check["path"]: check for check in told["config"]}
    assert len(checks) == 8
    assert checks[""]["error"] is checks["connectors[0]"]["error"] is checks["connectors[1]"]["error"] is None
    assert checks["connectors[1]"]["hooks"] == ["before_update_states"]
    assert "did you mean 'depth'" in checks["connectors[1]"]["settings"]["error"]
    assert "Unsupported connector type" in checks["connectors[2]"]["error"]
    assert "no_such_client_library" in checks["connectors[3]"]["error"]
    assert "ends the process" in checks["connectors[4]"]["error"]
    assert "kv_role" in checks["connectors[5]"]["error"]
    assert "str, not an object" in checks["connectors[6]"]["error"]
    problems = "\n".join(_texts(told, "problem"))
    assert "Did you mean 'Type1Connector'?" in problems
    assert "Importing connector crash_conn:Crash ended with SIGABRT" in "\n".join(_texts(told, "warning"))
    assert any("fails a request if a load of Good fails" in note for note in _texts(told, "note"))


def test_g3_doctor_sees_vllm_plugins(run_python):
    """With kvplug left out no connector is found and the hook isn't live: the variable is named as the reason."""
    told = _doctor(run_python, None, environ={"VLLM_PLUGINS": "kvplg"})
    assert told["ok"] is False
    assert "VLLM_PLUGINS" in told["summary"]
    assert told["hook"]["v1"] is None
    assert any("Type1Connector will refuse to start" in text for text in _texts(told, "problem"))


def test_doctor_asks_about_a_model(run_python, tmp_path):
    """The configuration that vLLM makes for a model tells the runner."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 256,
        "max_position_embeddings": 512, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = _doctor(run_python, None, "--model", str(tmp_path))
    assert told["ok"] is True, _texts(told, "problem")
    assert told["runner"] == "v1"
    assert any(str(tmp_path) in finding["text"] for finding in told["findings"] if finding["topic"] == "Model runner")
