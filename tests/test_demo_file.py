"""The demo with the hook in vLLM's files: a vLLM of its own is patched, and nothing is left of it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from demolib import files
from demolib.files import patched_vllm
from demolib.server import ServerError

from kvplug_hooks.deliver import DeliveryError, Exit, Vllm
from kvplug_hooks.installed import installed

DEMO = Path(__file__).resolve().parents[1] / "scripts" / "demo.py"
HOOKED = ("vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py")

pytestmark = pytest.mark.install


def content():
    """Return what the installed model runners, and RECORD, are."""
    site = installed().folder
    paths = [*(site / name for name in HOOKED), *site.glob("vllm*.dist-info/RECORD")]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_the_copy_is_patched_and_the_environment_is_not(tmp_path, monkeypatch):
    """All but the patched modules are links, the installed vLLM isn't touched, and the copy goes in the end."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = content()
    with patched_vllm(tmp_path / "vllm") as folder:
        own = {str(path.relative_to(folder)) for path in folder.glob("vllm/v1/worker/**/*.py") if not path.is_symlink()}
        assert own == set(HOOKED)
        assert all("before_update_states(self, scheduler_output)" in (folder / name).read_text() for name in HOOKED)
        assert content() == before
        assert Vllm.of().target.tree.folder == installed().folder, "the path is put right again"
    assert not folder.exists()
    assert content() == before


def test_what_cannot_be_patched_is_said(tmp_path, monkeypatch):
    """A refusal of kvplug-hooks is one sentence, and nothing is left."""

    def refuse():
        raise DeliveryError("No room.", Exit.FAILED)

    monkeypatch.setattr(files, "apply_patches", refuse)
    with (
        pytest.raises(ServerError, match=r"The hook can't be had in files: No room\."),
        patched_vllm(tmp_path / "vllm"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_no_other_vllm_is_patched(tmp_path, monkeypatch):
    """If the interpreter finds another vLLM than the copy, that one is left alone, and the demo says so."""
    monkeypatch.setattr(files, "_on_the_path", lambda _: files.contextlib.nullcontext())
    before = content()
    with pytest.raises(ServerError, match="not the demo's copy"), patched_vllm(tmp_path / "vllm"):
        pass
    assert content() == before


@pytest.mark.engine
def test_the_demo_in_file_mode(tmp_path):
    """`make demo ARGS="--hook file"`: the same reuse and the same answers, with the hook in the worker's own file."""
    before = content()
    command = [sys.executable, str(DEMO), "--hook", "file", "--out", str(tmp_path), "--conversations", "1"]
    done = subprocess.run([*command, "--turns", "2"], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["hook_mode"], found["tokens_equal"], found["logprobs_equal"]) == ("file", True, True)
    assert found["tokens_loaded"] >= found["prompt_tokens"] - 2 * 32
    assert "file: in the model runner's file" in done.stdout
    assert not (tmp_path / "vllm").exists()
    assert content() == before
