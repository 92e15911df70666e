"""Sources to patch: the installed vLLM's, and small ones made up for a case."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

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

    def run(self, *parts: str, path: str | None = None) -> str:
        """Return what pieces of code print, run with a stand-in for `kvplug.dispatch`.

        Each piece has an indentation of its own. `path` replaces the made-up package's folder on the path.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        environment["PYTHONPATH"] = str(self.folder) if path is None else path
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
