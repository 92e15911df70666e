"""Stale bytecode never runs in a patched module's place."""

from __future__ import annotations

import sys

import pytest

from kvplug_hooks.deliver import Exit

pytestmark = pytest.mark.install

MODULE = "vllm.v1.worker.gpu_model_runner"
HOOKED = f"import {MODULE} as runner; print(hasattr(runner, 'before_update_states'))"
COMPILE = "import py_compile, sys; py_compile.compile(sys.argv[1], invalidation_mode=py_compile.PycInvalidationMode.{})"


def caches(env, folder=None):
    """Return the names of the bytecode files of both runners."""
    folders = [env.v1.parent, env.v2.parent] if folder is None else [folder]
    return sorted(path.name for one in folders for path in one.glob("**/*model_runner.*.pyc"))


@pytest.mark.parametrize("operation", ["apply", "revert"])
def test_bytecode_of_every_tag_is_removed(env, operation):
    """Of other interpreters and of every optimisation level; what belongs to other modules stays."""
    if operation == "revert":
        env.vllm().apply()
    folder = env.v1.parent / "__pycache__"
    folder.mkdir(exist_ok=True)
    mine = [
        "gpu_model_runner.cpython-399.pyc",
        "gpu_model_runner.cpython-398.opt-2.pyc",
        "gpu_model_runner.pypy310.pyc",
    ]
    others = ["gpu_worker.cpython-399.pyc", "gpu_model_runner_v2.cpython-399.pyc", "gpu_model_runner.py"]
    for name in mine + others:
        (folder / name).write_bytes(b"")
    assert env.cli(operation).exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(others)


@pytest.mark.parametrize("mode", ["TIMESTAMP", "CHECKED_HASH", "UNCHECKED_HASH"])
def test_the_patched_module_runs_whatever_kind_of_bytecode_there_was(env, mode):
    """Also the kind that Python never compares with the source, which some images are made with."""
    for expected in ("True", "False"):
        env.run(COMPILE.format(mode).replace("sys.argv[1]", repr(str(env.v1))))
        assert caches(env) == [f"gpu_model_runner.{sys.implementation.cache_tag}.pyc"]
        assert env.cli("apply" if expected == "True" else "revert").exit_code == 0
        assert env.run(HOOKED).stdout == f"{expected}\n"


def test_a_module_that_was_compiled_is_compiled_again(env):
    """In an image that is read-only when it runs, each process would have to compile the module otherwise."""
    env.run(f"import {MODULE}")
    assert env.cli("apply").exit_code == 0
    name = f"gpu_model_runner.{sys.implementation.cache_tag}.pyc"
    assert caches(env) == [name]
    source, compiled = env.v1.stat(), (env.v1.parent / "__pycache__" / name).read_bytes()
    # The header's time and size are those of the patched file, so this is what runs.
    assert int.from_bytes(compiled[8:12], "little") == int(source.st_mtime)
    assert int.from_bytes(compiled[12:16], "little") == source.st_size


def test_a_folder_of_bytecode_elsewhere_is_cleared_too(env, tmp_path, monkeypatch):
    """PYTHONPYCACHEPREFIX moves bytecode out of the package: it is renewed there, and not made elsewhere."""
    prefix = tmp_path / "prefix"
    there = ("-X", f"pycache_prefix={prefix}")
    env.run(COMPILE.format("UNCHECKED_HASH").replace("sys.argv[1]", repr(str(env.v1))), *there)
    (other,) = prefix.glob("**/gpu_model_runner.*.pyc")
    other.with_name("gpu_model_runner.cpython-399.pyc").touch()
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(prefix))
    assert env.cli("apply").exit_code == 0
    assert caches(env, prefix) == [other.name]
    assert caches(env) == []
    assert env.run(HOOKED, *there).stdout == "True\n"


def test_verify_finds_bytecode_that_would_run_in_the_patched_files_place(env):
    """Who copies old bytecode into an image gets an unpatched vLLM: verify names the file, status doesn't look."""
    env.run(COMPILE.format("UNCHECKED_HASH").replace("sys.argv[1]", repr(str(env.v1))))
    path = env.v1.parent / "__pycache__" / f"gpu_model_runner.{sys.implementation.cache_tag}.pyc"
    old = path.read_bytes()
    env.vllm().apply()
    env.run(COMPILE.format("UNCHECKED_HASH").replace("sys.argv[1]", repr(str(env.v1))))
    assert env.cli("verify").exit_code == 0
    path.write_bytes(old)
    assert env.run(HOOKED).stdout == "False\n"
    verify = env.cli("verify")
    assert verify.exit_code == Exit.INCOMPLETE
    assert (
        f"{path} is bytecode of another gpu_model_runner.py, and may be run in its place; remove it." in verify.output
    )
    assert env.cli("status").exit_code == 0
