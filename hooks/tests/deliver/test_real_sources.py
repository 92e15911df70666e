"""What is shown on small modules holds for the installed vLLM's own, of hundreds of kilobytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplug_hooks.deliver import Exit

pytestmark = pytest.mark.install


def test_the_installed_vllms_modules(make_environment, small_vllm, vllm_tree):
    """A copy of the real modules is patched, passes verify, which compiles it, and reverts to the byte."""
    files = small_vllm(str(vllm_tree.version))
    for name in files:
        if name.endswith(("model_runner.py", "kv_cache_utils.py")):
            files[name] = (vllm_tree.folder / name).read_bytes()
    env = make_environment(vllm=files)
    before = env.snapshot()
    done = env.vllm().apply()
    assert done.code == Exit.APPLIED
    assert set(done.applied) >= {"before_update_states.v1", "before_update_states.v2"}
    assert all(one.state in ("applied", "not needed") for one in done.patches)
    for name in done.changed:
        original, patched = before[name].decode().splitlines(), (env.site / name).read_text().splitlines()
        assert len(patched) == len(original) + 2
    assert env.cli("verify").exit_code == 0
    assert env.cli("revert").exit_code == 0
    assert env.snapshot() == before


def test_the_tests_own_vllm_stays_unpatched(vllm_tree):
    """No test patches the environment that it runs in."""
    assert not (Path(vllm_tree.folder) / ".kvplug-hooks").exists()
