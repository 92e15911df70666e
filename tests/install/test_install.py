"""What a user gets: wheels, built and installed as pip does it, in an environment that has vLLM and nothing of ours."""

from __future__ import annotations

import email
import hashlib
import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

from support.env_script import ROOT, load_setup_env
from support.fresh import FreshEnvironment, build_wheels
from support.servers import Server, serve

pytestmark = pytest.mark.install

WORKSPACE = load_setup_env().Workspace.read(ROOT)

#: More than nine blocks of 32 tokens.
PROMPT = [(11 * i + 5) % 256 for i in range(300)]

FIND_PACKAGES = """
import importlib.util, json, sys
print(json.dumps({name: importlib.util.find_spec(name).origin for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    build_wheels([ROOT / member for member in WORKSPACE.members], folder)
    return folder


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, wheels):
    """Return an environment into which only kvplug-type1 was installed by name."""
    environment = FreshEnvironment.make(tmp_path_factory.mktemp("fresh") / "env")
    environment.install("kvplug-type1", wheels)
    return environment


def test_there_is_a_wheel_for_each_member(wheels):
    """Each distribution builds, for any platform and Python 3."""
    built = {wheel.name.split("-")[0] for wheel in wheels.glob("*-py3-none-any.whl")}
    assert built == set(WORKSPACE.packages())
    assert len(list(wheels.iterdir())) == len(built)


@pytest.mark.parametrize("package", sorted(WORKSPACE.packages()))
def test_a_wheel_has_its_package_and_nothing_else(wheels, package):
    """A wheel has the package's files as they are in the tree, its typing marker and its licence; no tests."""
    (wheel,) = wheels.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata_file = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_file))
    source = WORKSPACE.packages()[package].parent
    expected = {
        f"{package}/{file.relative_to(source).as_posix()}"
        for file in source.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    info = metadata_file.rpartition("/")[0]
    assert {name for name in names if not name.startswith(f"{info}/")} == expected
    assert f"{package}/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_environment_has_only_what_was_installed(fresh, wheels):
    """Packages come from the wheels, not from this tree: the links to vLLM bring no editable install along."""
    origins = fresh.ask(FIND_PACKAGES, "kvplug", "kvplug_hooks", "kvplug_type1")
    for name, origin in origins.items():
        assert origin.startswith(str(fresh.folder / "lib")), f"{name} comes from {origin}"


def test_g9_the_connector_is_listed(fresh):
    """After one install, `kvplug list` in a new process shows the connector and where it is from."""
    listed = {one["name"]: one for one in json.loads(fresh.command("kvplug", "list", "--json"))["connectors"]}
    assert listed["Type1Connector"]["distribution"] == "kvplug-type1"
    assert listed["Type1Connector"]["editable"] is False
    assert "AIBrixOffloadingConnectorV1Type1" in listed


def _check_reuse(server: Server) -> None:
    """Demand that a prompt that vLLM has forgotten gets the same answer again, from blocks that the connector kept."""
    loaded = "vllm:kvplug_tokens_loaded_total"
    first = server.complete(PROMPT, return_token_ids=True)
    assert server.metric(loaded) == 0
    server.post("/reset_prefix_cache")
    assert server.complete(PROMPT, return_token_ids=True)["token_ids"] == first["token_ids"]
    assert server.metric(loaded) == len(PROMPT) // 32 * 32


def _real_files() -> dict[str, str]:
    """Return the hashes of the model runners that the tests' own environment has."""
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in vllm.glob("v1/worker/**/*runner.py")}


@pytest.mark.engine
def test_h6_the_connector_serves_from_patched_files(fresh, models):
    """The patch goes into the environment's own files, not where they link to, and the connector serves with it."""
    before = _real_files()
    engine = fresh.own_vllm()
    fresh.command("kvplug-hooks", "apply")
    try:
        told = json.loads(fresh.command("kvplug-hooks", "verify", "--json"))
        assert told["state"] == "applied"
        assert told["folder"] == str(engine)
        connector = {"kv_connector": "Type1Connector", "kv_role": "kv_both"}
        with serve(models("llama"), connector=connector, python=fresh.python) as server:
            _check_reuse(server)
    finally:
        fresh.command("kvplug-hooks", "revert")
    assert _real_files() == before


@pytest.mark.engine
def test_the_connector_serves_by_its_name(fresh, models):
    """A stock server takes the connector by name alone, with no module path, and serves."""
    connector = {"kv_connector": "Type1Connector", "kv_role": "kv_both"}
    with serve(models("llama"), connector=connector, python=fresh.python) as server:
        _check_reuse(server)
