"""Sources to patch: the installed vLLM's, and small ones made up for a case."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvplug
import kvplug_hooks
from kvplug_hooks.installed import Tree, installed

V1_SOURCE = '''\
"""A runner."""

import os
from typing import (
    TYPE_CHECKING,
    Any,
)

if TYPE_CHECKING:
    import json


class GPUModelRunner:
    def _update_states(self, scheduler_output):
        num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        return num_scheduled_tokens

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        with open(os.devnull):
            # Read the count.
            num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens
            if num_scheduled_tokens < 0:
                raise ValueError("boom")
            return num_scheduled_tokens
'''

V2_SOURCE = '''\
"""The second runner."""

import os


class GPUModelRunner:
    def execute_model(self, scheduler_output, dummy_run=False):
        if not dummy_run:
            # Update the state.
            self.finish_requests(scheduler_output)
        if not dummy_run:
            os.getpid()
        return scheduler_output

    def finish_requests(self, scheduler_output):
        return None
'''

#: Where the code under test is, for interpreters that are started here.
CODE = os.pathsep.join(dict.fromkeys(str(Path(package.__path__[0]).parent) for package in (kvplug, kvplug_hooks)))

DISPATCH = """
import sys, types
import kvplug
dispatch = types.ModuleType("kvplug.dispatch")
dispatch.calls = []
def before_update_states(runner, scheduler_output):
    dispatch.calls.append(runner)
    return scheduler_output
dispatch.before_update_states = before_update_states
sys.modules["kvplug.dispatch"] = dispatch
Output = types.SimpleNamespace
"""


@pytest.fixture
def v1_source() -> str:
    """A module with the shape of the first model runner."""
    return V1_SOURCE


@pytest.fixture
def v2_source() -> str:
    """A module with the shape of the second model runner."""
    return V2_SOURCE


@pytest.fixture(scope="session")
def vllm_tree() -> Tree:
    """The vLLM that is installed."""
    tree = installed()
    assert tree is not None, "these tests need an installed vLLM"
    return tree


@dataclass
class Sandbox:
    """A folder with a made-up `vllm` package, and fresh interpreters that import it instead of the real one."""

    folder: Path

    @property
    def v1(self) -> Path:
        return self.folder / "vllm/v1/worker/gpu_model_runner.py"

    @property
    def v2(self) -> Path:
        return self.folder / "vllm/v1/worker/gpu/model_runner.py"

    def write(self, module: str, source: str) -> Path:
        """Write a module, and empty packages above it."""
        path = self.folder / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(self.folder).parents[:-1]:
            (self.folder / parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(source))
        return path

    def ship(self, distribution: str, code: str, *names: str, group: str = "kvplug.patches") -> None:
        """Install a distribution with a module of the same name, and with entry points for its `PATCHES`."""
        self.write(distribution, code)
        metadata = self.folder / f"{distribution}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        points = "".join(f"{name} = {distribution}:PATCHES\n" for name in names or ("patches",))
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{points}")

    def run(self, *parts: str, path: str | None = None) -> str:
        """Return what pieces of code print, run with a stand-in for `kvplug.dispatch`.

        Each piece has an indentation of its own. `path` replaces the made-up package's folder on the path.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.folder) if path is None else path, CODE])
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(map(textwrap.dedent, (DISPATCH, *parts)))],
            env=environment,
            cwd=self.folder.parent,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A made-up vLLM with both runners."""
    sandbox = Sandbox(tmp_path / "site")
    for package in ("vllm", "vllm/v1", "vllm/v1/worker", "vllm/v1/worker/gpu"):
        (sandbox.folder / package).mkdir(parents=True)
        (sandbox.folder / package / "__init__.py").touch()
    sandbox.v1.write_text(V1_SOURCE)
    sandbox.v2.write_text(V2_SOURCE)
    return sandbox


EARLY_SOURCE = '''
"""A module that vLLM imports before it loads plugins."""

from functools import wraps

LIMIT = 100


def logged(function):
    @wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def double(number, factor=2):
    """Multiply."""
    result = number * factor
    if result > LIMIT:
        raise ValueError("too large")
    return result


@logged
def halve(number):
    """Divide."""
    return number / 2


class Table:
    def lookup(self, number):
        key = number
        return key

    @staticmethod
    def fixed(number):
        return number
'''

DECLARE_EARLY = """
from kvplug_hooks import Before, FirstStatement, Patch

def patch(id, function, **changes):
    values = dict(
        id=id,
        purpose="Test.",
        removal_condition="Never.",
        module="vllm.v1.early",
        function=function,
        anchor=FirstStatement(),
        import_from="other_end",
        import_name="plus_one",
        call="number = plus_one(number)",
        known_releases=("0.1.0",),
        applied="replace",
    )
    return Patch(**values | changes)
"""


@pytest.fixture
def early(sandbox):
    """A made-up vLLM with a module that is imported early, and a way to install a distribution that patches it."""
    sandbox.write("other_end", "def plus_one(number):\n    return number + 1\n")

    def ship(*patches, more=""):
        sandbox.write("vllm.v1.early", EARLY_SOURCE + more)
        sandbox.ship("acme", f"{DECLARE_EARLY}\nPATCHES = [{', '.join(patches)}]\n")
        return sandbox

    return ship
