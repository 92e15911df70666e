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
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(json.dumps({name: spec and spec.origin for name, spec in specs.items()}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    build_wheels([ROOT / member for member in WORKSPACE.members], folder)
    return folder


def _environment(name, tmp_path_factory, wheels):
    environment = FreshEnvironment.make(tmp_path_factory.mktemp(name) / "env")
    environment.install(name, wheels)
    return environment


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, wheels):
    """Return an environment into which only kvplug-type1 was installed by name."""
    return _environment("kvplug-type1", tmp_path_factory, wheels)


@pytest.fixture(scope="module")
def fresh_type2(tmp_path_factory, wheels):
    """Return an environment into which only kvplug-type2 was installed by name."""
    return _environment("kvplug-type2", tmp_path_factory, wheels)


@pytest.fixture(scope="module")
def fresh_pd_reuse(tmp_path_factory, wheels):
    """Return an environment into which only kvplug-pd-reuse was installed by name, without its extra."""
    environment = _environment("kvplug-pd-reuse", tmp_path_factory, wheels)
    for link in (environment.folder / "engine").glob("vllm_router*"):
        link.unlink()  # the tests' own environment has it
    return environment


#: By the beginning of a connector's name: its distribution, the connector's other name, and the environment's fixture.
CONNECTORS = {
    "Type1": ("kvplug-type1", "AIBrixOffloadingConnectorV1Type1", "fresh"),
    "Type2": ("kvplug-type2", "AIBrixOffloadingConnectorV1Type2", "fresh_type2"),
    "PDReuse": ("kvplug-pd-reuse", "AIBrixPDReuseConnector", "fresh_pd_reuse"),
}


@pytest.fixture(params=CONNECTORS)
def installed(request):
    """Return the beginning of a connector's name, and the environment that has it."""
    return request.param, request.getfixturevalue(CONNECTORS[request.param][2])


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


def test_the_environment_has_only_what_was_installed(installed):
    """Packages come from the wheels, not from this tree; type1 brings the hooks along, the others need none."""
    name, environment = installed
    needed = {"kvplug", CONNECTORS[name][0].replace("-", "_"), *({"kvplug_hooks"} if name == "Type1" else ())}
    origins = environment.ask(FIND_PACKAGES, *sorted(WORKSPACE.packages()))
    assert {package for package, origin in origins.items() if origin} == needed
    for package in needed:
        assert origins[package].startswith(str(environment.folder / "lib")), f"{package} is from {origins[package]}"


def test_g9_the_connector_is_listed(installed):
    """After one install, `kvplug list` in a new process shows the connector and where it is from."""
    name, environment = installed
    listed = {one["name"]: one for one in json.loads(environment.command("kvplug", "list", "--json"))["connectors"]}
    distribution, alias, _ = CONNECTORS[name]
    assert listed.keys() == {f"{name}Connector", alias}
    for one in listed.values():
        assert one["distribution"] == distribution
        assert one["editable"] is False
        assert one["needs_hook"] is (name == "Type1")


def test_j12_the_router_is_an_extra(fresh_pd_reuse):
    """`kvplug pd` comes with the connector; without what its extra brings it says in one line what to install."""
    assert "up" in fresh_pd_reuse.command("kvplug", "pd", "--help")
    with pytest.raises(AssertionError, match=r"kvplug-pd-reuse\[router\]"):
        fresh_pd_reuse.command("kvplug", "pd", "up", "--model", "none")


def _check_reuse(server: Server, loaded: str = "vllm:kvplug_tokens_loaded_total") -> None:
    """Demand that a prompt that vLLM has forgotten gets the same answer again, from blocks that the connector kept."""
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
@pytest.mark.parametrize("name", ["Type1", "Type2"])
def test_the_connector_serves_by_its_name(name, request, models):
    """A stock server takes the connector by name alone, with no module path, and serves."""
    environment = request.getfixturevalue(CONNECTORS[name][2])
    connector = {"kv_connector": f"{name}Connector", "kv_role": "kv_both"}
    counters = {"Type1": "vllm:kvplug_tokens_loaded_total", "Type2": "vllm:external_prefix_cache_hits_total"}
    with serve(models("llama"), connector=connector, python=environment.python) as server:
        _check_reuse(server, counters[name])
