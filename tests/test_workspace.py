"""The workspace's members, and every list that has to name all of them, say the same."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path, PurePosixPath

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.env_script import ROOT, load_setup_env

SHARED = tomllib.loads((ROOT / "pyproject.toml").read_text())
MEMBERS = SHARED["tool"]["uv"]["workspace"]["members"]
PROJECTS = {member: tomllib.loads((ROOT / member / "pyproject.toml").read_text()) for member in MEMBERS}


def _name(member: str) -> str:
    return PROJECTS[member]["project"]["name"]


def _packages(member: str) -> list[Path]:
    return [file.parent for file in (ROOT / member / "src").glob("*/__init__.py")]


def _version(member: str) -> str:
    values: dict[str, str] = {}
    file = ROOT / member / PROJECTS[member]["tool"]["hatch"]["version"]["path"]
    line = next(line for line in file.read_text().splitlines() if line.startswith("__version__ = "))
    exec(line, values)
    return values["__version__"]


def test_every_distribution_is_a_member():
    """A folder with a ``pyproject.toml`` under core, hooks or plugins is a member, and members are such folders."""
    places = [ROOT / "core", ROOT / "hooks", *(ROOT / "plugins").iterdir()]
    assert sorted(MEMBERS) == sorted(
        str(place.relative_to(ROOT)) for place in places if (place / "pyproject.toml").exists()
    )


def test_pip_and_uv_have_the_same_members():
    """The set-up for pip installs the members of the uv workspace, and uv takes each of them from the workspace."""
    assert list(load_setup_env().Workspace.read(ROOT).members) == MEMBERS
    assert SHARED["tool"]["uv"]["sources"] == {_name(member): {"workspace": True} for member in MEMBERS}


def test_the_root_is_virtual():
    """The root is no distribution: uv and pip must find all of them in the members."""
    assert "project" not in SHARED
    assert "build-system" not in SHARED


@pytest.mark.parametrize("member", MEMBERS)
def test_tools_cover_every_member(member):
    """Ruff, mypy and pytest look at each member."""
    assert f"{member}/src" in SHARED["tool"]["ruff"]["src"]
    assert f"{member}/src" in SHARED["tool"]["mypy"]["files"]
    assert f"{member}/src" in SHARED["tool"]["mypy"]["mypy_path"].split(":")
    patterns = SHARED["tool"]["pytest"]["ini_options"]["testpaths"]
    assert any(PurePosixPath(member, "tests").match(pattern) for pattern in patterns)


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_is_typed_and_licensed(member):
    """Each distribution has one package with ``py.typed``, the workspace's licence, and the Python it promises."""
    (package,) = _packages(member)
    assert (package / "py.typed").exists()
    assert (ROOT / member / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert PROJECTS[member]["project"]["license-files"] == ["LICENSE"]
    assert PROJECTS[member]["project"]["requires-python"] == ">=3.10"


@pytest.mark.parametrize("member", MEMBERS)
def test_siblings_are_required_in_a_range_that_admits_them(member):
    """A requirement on a sibling has a lower and an upper bound, and the sibling in this tree is between them."""
    siblings = {canonicalize_name(_name(other)): other for other in MEMBERS}
    for requirement in map(Requirement, PROJECTS[member]["project"]["dependencies"]):
        sibling = siblings.get(canonicalize_name(requirement.name))
        if sibling is not None:
            assert {one.operator for one in requirement.specifier} == {">=", "<"}
            assert requirement.specifier.contains(_version(sibling), prereleases=True)


@pytest.mark.parametrize("member", MEMBERS)
def test_nobody_requires_vllm(member):
    """VLLM has many distributions: requiring one would install a second build beside the user's. An extra may."""
    names = {canonicalize_name(Requirement(one).name) for one in PROJECTS[member]["project"]["dependencies"]}
    assert not {name for name in names if name == "torch" or name.startswith("vllm")}


def test_g9_the_documented_install_shows_every_connector():
    """What the two commands install has the entry points of all members, connectors included."""
    groups = {group for project in PROJECTS.values() for group in project["project"].get("entry-points", {})}
    assert "vllm.kv_connectors" in groups
    for group in groups:
        declared = {
            (name, value)
            for project in PROJECTS.values()
            for name, value in project["project"].get("entry-points", {}).get(group, {}).items()
        }
        installed = {(entry.name, entry.value) for entry in importlib.metadata.entry_points(group=group)}
        assert declared <= installed
