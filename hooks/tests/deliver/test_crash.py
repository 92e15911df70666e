"""A process that is killed at any step of an operation leaves whole files, and the next operation puts things right."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import replace

import pytest

from kvplug_hooks.deliver import Exit
from kvplug_hooks.deliver.bytecode import stale
from kvplug_hooks.deliver.target import Target

pytestmark = pytest.mark.install

KILLED = 77

#: Everything that changes something on the disk, or waits for it.
CALLS = (
    *("open", "write", "fsync", "fchmod", "fchown", "utime", "replace"),
    *("unlink", "mkdir", "rmdir", "chmod", "chown", "close"),
)


@pytest.fixture
def template(env, monkeypatch):
    """An environment, and a target that starts no process."""
    monkeypatch.setattr(Target, "why_not_valid", lambda self, modules: None)
    monkeypatch.setattr(Target, "compile", lambda self, sources: None)
    return env


def add_bytecode(env) -> None:
    """Give the modules bytecode that Python would never check."""
    for path in (env.v1, env.v2):
        cache = path.parent / "__pycache__" / f"{path.stem}.cpython-399.pyc"
        cache.parent.mkdir(exist_ok=True)
        header = importlib.util.MAGIC_NUMBER + (0b01).to_bytes(4, "little")
        cache.write_bytes(header + importlib.util.source_hash(path.read_bytes()) + b"code")


def killed_at(step: int, operation) -> bool:
    """Run an operation in a process that is killed before its n-th step, in half if that is a write.

    Returns:
        Whether it came to that step.

    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _kill_before(step)
            operation()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


def _kill_before(step: int) -> None:
    left = step

    def wrapped(name, real):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os._exit(KILLED)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))


def steps(template, operation):
    """Yield a copy of an environment for each step at which an operation was killed in it."""
    target = template.vllm().target
    vllm = template.vllm()
    for step in range(1, 500):
        copy = replace(template, folder=template.folder.parent / f"step{step}")
        shutil.copytree(template.folder, copy.folder, symlinks=True)
        tree = replace(target.tree, folder=copy.site)
        owner = replace(target.owner, record=copy.record)
        here = replace(vllm, target=replace(target, python=str(copy.python), tree=tree, owner=owner))
        if not killed_at(step, lambda here=here: getattr(here, operation)()):
            assert step > 30, "an operation has more steps than that"
            return
        yield step, copy, here
        shutil.rmtree(copy.folder)
    raise AssertionError("the operation never ends")


def check(copy, here, original, patched):
    """Demand that each file is the original or the patched one, and that status and verify say which."""
    states = {}
    for path in (copy.v1, copy.v2):
        name = str(path.relative_to(copy.site))
        data = path.read_bytes()
        assert data in (original[name], patched[name])
        assert list(stale(path, data, None)) == [], "Python would run the other file's bytecode"
        states[name] = "applied" if data == patched[name] else "absent"
    record = copy.record.read_bytes().splitlines()
    name = str(copy.record.relative_to(copy.site))
    rows = zip(record, original[name].splitlines(), patched[name].splitlines(), strict=True)
    assert all(row in (old, new) for row, old, new in rows)

    status = here.status()
    assert {one.path: one.state for one in status.patches if one.state != "not needed"} == states
    applied = set(states.values()) == {"applied"}
    assert status.code == (Exit.APPLIED if applied else Exit.ABSENT)
    verify = here.verify()
    right = applied and copy.record.read_bytes() == patched[name] and not list(copy.site.rglob("*.kvplug-hooks-new"))
    if right:
        assert verify.code == Exit.APPLIED
    elif applied:
        # RECORD's own leftover is nobody's harm.
        assert verify.code in (Exit.INCOMPLETE, Exit.APPLIED)
    else:
        assert verify.code == Exit.ABSENT


@pytest.mark.parametrize("operation", ["apply", "revert"])
def test_an_operation_that_is_killed_at_any_step_can_be_completed(template, operation):
    """No half-written file and no double application; apply completes it, and revert restores every byte."""
    original = template.snapshot()
    template.vllm().apply()
    patched = template.snapshot()
    if operation == "apply":
        template.vllm().revert()
        assert template.snapshot() == original
    add_bytecode(template)

    seen = set()
    for step, copy, here in steps(template, operation):
        check(copy, here, original, patched)
        seen.add(tuple(copy.hooked()))
        if step % 2:
            assert here.apply().code == Exit.APPLIED
            assert copy.snapshot() == patched
            assert here.verify().code == Exit.APPLIED
        assert here.revert().code == Exit.ABSENT
        assert copy.snapshot() == original
        assert not (copy.site / ".kvplug-hooks").exists()
    # Not only before the first file or after the last one.
    assert {(), ("v1", "v2")} < seen
