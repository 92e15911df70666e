"""docs/patches.md, followed to the letter: its blocks are built into a wheel, and the patch is applied."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvplug
import kvplug_hooks
from kvplug_hooks import Patch, releases
from kvplug_hooks.patches import all_patches
from support.releases import source_tree

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "patches.md"
CODE = [str(Path(package.__path__[0]).parent) for package in (kvplug, kvplug_hooks)]

SCHEDULER = '''\
"""A scheduler."""

import enum


class Scheduler:
    def _preempt_request(self, request, timestamp):
        """Preempt."""
        assert request.status == "running"
        request.status = "preempted"
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The page's files, and what its wheel installs."""
    folder = tmp_path_factory.mktemp("acme")
    files = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, text in files:
        path = folder / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=folder / "project",
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder


def run(project, *command, first=()):
    """Run Python where the wheel is installed."""
    path = os.pathsep.join([*map(str, first), str(project / "site"), *CODE])
    return subprocess.run(
        [sys.executable, *command],
        cwd=project / "project",
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {"PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.install
def test_the_page_s_own_test_passes(project):
    """The declaration fits the installed vLLM, as the page's test says."""
    done = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.install
def test_the_page_s_command_finds_the_patch(project):
    """`kvplug-hooks status` knows a patch that another distribution ships."""
    (line,) = [line for line in PAGE.read_text().split("\n") if line.startswith("kvplug-hooks status ")]
    done = run(project, "-m", "kvplug_hooks.cli", *line.split()[1:])
    assert "acme.log_preemptions" in done.stdout, done.stdout + done.stderr
    unknown = run(project, "-m", "kvplug_hooks.cli", "status", "--patch", "acme.other")
    assert unknown.returncode != done.returncode


@pytest.mark.install
@pytest.mark.parametrize("early", [True, False])
def test_the_patch_is_applied(project, tmp_path, early):
    """A scheduler that is imported logs preemptions, whether it was imported before or after the plugins."""
    path = tmp_path / "vllm/v1/core/sched/scheduler.py"
    path.parent.mkdir(parents=True)
    for parent in [*path.parents][: len(path.relative_to(tmp_path).parents) - 1]:
        (parent / "__init__.py").touch()
    path.write_text(SCHEDULER)
    script = f"""
import logging, types
logging.basicConfig(format="%(message)s", level=logging.INFO)
if {early}:
    from vllm.v1.core.sched import scheduler
import kvplug_hooks
kvplug_hooks.install()
from vllm.v1.core.sched.scheduler import Scheduler
Scheduler()._preempt_request(types.SimpleNamespace(status="running", request_id="r1", num_computed_tokens=7), 0.0)
print(kvplug_hooks.status()["acme.log_preemptions"].state)
"""
    done = run(project, "-c", script, first=[tmp_path])
    assert (done.returncode, done.stdout) == (0, "applied\n"), done.stderr
    assert "Preempted r1 after 7 tokens." in done.stderr


@pytest.mark.install
@pytest.mark.parametrize("release", ["0.14.0", "0.19.0", "0.33.0"])
def test_the_page_s_patch_fits_what_it_says(project, release):
    """The releases that it knows take it; an older one is too old, a newer one is judged by its source."""
    tree = source_tree(release)
    script = f"""
import pathlib
from acme_vllm.patches import PATCHES
from kvplug_hooks.installed import Tree
from kvplug_hooks.plan import plan
print(plan(Tree(pathlib.Path({str(tree.folder)!r})), PATCHES)[0].state)
"""
    done = run(project, "-c", script)
    assert done.stdout.strip() == ("unsupported" if release == "0.14.0" else "fits"), done.stderr


def test_the_page_names_every_field_and_anchor():
    """The reference is complete: fields of a declaration, anchors, states, patches."""
    page = PAGE.read_text()
    fields = [field.name for field in dataclasses.fields(Patch)]
    named = set(re.findall(r"`(\w+)`", page.partition("### A declaration")[2].partition("Anchors,")[0]))
    assert set(fields) <= named
    for name in ("Before", "FirstIn", "FirstStatement"):
        assert name in kvplug_hooks.__all__
        assert f"`{name}(" in page
    for patch in all_patches():
        assert f"`{patch.id}`" in page
    states = set(re.findall(r"^\| `([a-z ]+)` \| (?:files|process|both)", page, re.MULTILINE))
    assert states >= {*releases_states(), "pending", "applied", "failed", "too late", "not installed"}


def releases_states():
    return {entry.state for entries in releases.recorded().values() for entry in entries.values()}


def test_the_table_is_up_to_date():
    """It is what the generator makes of the declarations and the record."""
    spec = importlib.util.spec_from_file_location("patch_table", ROOT / "scripts" / "patch_table.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = PAGE.read_text()
    assert generator.updated(page, releases.recorded()) == page
    assert [row.split(" | ")[0].strip("| ") for row in generator.table(releases.recorded()).split("\n")[2:-1]] == list(
        releases.recorded()
    )
    assert "| 0.19.0 | V1 | needed: 2 lines | needed: 2 lines | needed: 2 lines |" in page
