"""Bad luck: what the system refuses, others who are at work, and a kvplug that is gone."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess

import pytest

from kvplug_hooks.deliver import DeliveryError, Exit
from kvplug_hooks.deliver.lock import exclusive


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.EROFS, Exit.READ_ONLY, "by default kvplug patches vLLM as it is imported."),
        (errno.EACCES, Exit.READ_ONLY, "run kvplug-hooks as a user who may write there"),
        (errno.ENOSPC, Exit.FAILED, "nothing was changed, remove the cause and try again."),
    ],
)
@pytest.mark.parametrize("when", ["apply open", "apply replace", "revert open", "revert replace"])
def test_a_refusal_in_the_middle_undoes_everything(env, monkeypatch, number, code, remedy, when):  # noqa: PLR0917
    """The second module can't be written, or can't take its name: the first one is put back."""
    operation, call = when.split()
    if operation == "revert":
        env.vllm().apply()
    before = env.snapshot()
    real = getattr(os, call)

    def refuse(path, *arguments, **options):
        if ".model_runner.py.kvplug-hooks-new" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, call, refuse)
    result = env.cli(operation)
    monkeypatch.undo()
    assert result.exit_code == code, result.output
    assert f"can't be {'patched' if operation == 'apply' else 'reverted'}" in result.output
    assert remedy in result.output
    assert env.snapshot() == before


@pytest.mark.install
def test_a_read_only_tree(env, own_process):
    """In an image that is mounted read-only, apply says so; status and verify tell, and a second apply is fine."""
    tree = str(env.folder)
    read_only = f'mount --bind {tree} {tree} && mount -o remount,bind,ro {tree} {tree} && exec "$@"'
    alone = ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "-m", "sh", "-c", read_only, "sh"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs mounts of its own: `unshare -m` and `mount --bind`")

    def run(command):
        return own_process(command, "--python", str(env.python), before=alone)

    apply = run("apply")
    assert apply.returncode == Exit.READ_ONLY, apply.stderr
    assert f"Error: The vLLM in {env.site} can't be patched" in apply.stderr
    assert "Read-only file system" in apply.stderr
    assert apply.stderr.count("\n") == 1
    assert run("status").returncode == Exit.ABSENT

    env.vllm().apply()
    assert [run(command).returncode for command in ("apply", "status", "verify")] == [0, 0, 0]
    assert run("revert").returncode == Exit.READ_ONLY
    assert env.hooked() == ["v1", "v2"]


def test_one_patcher_at_a_time(env):
    """While another one is at work, a command waits, and then says so with a status of its own."""
    with exclusive(env.site, 0):
        with pytest.raises(DeliveryError, match="Another kvplug-hooks is at work") as caught:
            dataclasses.replace(env.vllm(), timeout=0.0).apply()
        assert caught.value.code == Exit.BUSY
        assert env.cli("status").exit_code == Exit.ABSENT
    assert env.hooked() == []


def test_a_manifest_that_cannot_be_read_is_said_so(env):
    """Nothing is guessed about files whose history is unreadable."""
    env.vllm().apply()
    env.manifest.write_text("{")
    for command in ("apply", "revert", "status"):
        assert f"{env.manifest} isn't a manifest" in env.refuses(Exit.DRIFTED, command)


def test_a_patched_vllm_without_kvplug_fails_at_import_and_names_the_remedy(env, own_process):
    """It never fails at a request; the traceback names `kvplug-hooks revert`, which works without kvplug, too."""
    before = env.snapshot()
    env.vllm().apply()
    for path in env.site.glob("kvplug/*"):
        path.unlink()
    failed = env.run("import vllm.v1.worker.gpu_model_runner")
    assert failed.returncode == 1
    assert "No module named 'kvplug" in failed.stderr
    assert "`kvplug-hooks revert`" in failed.stderr
    (env.site / "kvplug" / "dispatch.py").parent.rmdir()
    for command in ("status", "verify", "apply"):
        result = env.cli(command)
        assert result.exit_code == Exit.INCOMPLETE
        assert "has no kvplug, which a patched vLLM imports" in result.output

    done = own_process("revert", "--python", str(env.python), hidden="kvplug")
    assert done.returncode == 0, done.stderr
    assert {name: data for name, data in before.items() if not name.startswith("kvplug/")} == env.snapshot()
