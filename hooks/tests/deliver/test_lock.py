"""One patcher at a time for each vLLM; the lock ends with its holder and leaves nothing behind."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from kvplug_hooks.deliver.lock import exclusive
from kvplug_hooks.deliver.manifest import FOLDER, manifest_path
from kvplug_hooks.deliver.states import DeliveryError, Exit

HOLD = """
import sys, pathlib
from kvplug_hooks.deliver.lock import exclusive
with exclusive(pathlib.Path(sys.argv[1]), 10):
    print("held", flush=True)
    sys.stdin.readline()
"""

COUNT = """
import sys, pathlib
from kvplug_hooks.deliver.lock import exclusive
folder = pathlib.Path(sys.argv[1])
counter = folder / "counter"
for _ in range(20):
    with exclusive(folder, 60):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


def start(command):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def holder(tmp_path, own_code):
    """Another process that has the lock."""
    with start(own_code(HOLD, tmp_path)) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        if process.poll() is None:
            process.communicate("\n")


def test_a_second_one_waits_and_then_says_so(tmp_path, holder):
    """Whoever can't have the lock in time is told in one sentence, with an exit status of its own."""
    with (
        pytest.raises(DeliveryError, match=r"Another kvplug-hooks is at work .*; wait") as caught,
        exclusive(tmp_path, 0),
    ):
        pass
    assert caught.value.code == Exit.BUSY


def test_a_second_one_comes_in_when_the_first_has_ended(tmp_path, holder):
    """The lock is free once its holder let it go."""
    holder.communicate("\n")
    with exclusive(tmp_path, 10):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_killed_holder_frees_the_lock(tmp_path, holder):
    """There is no stale lock: the system frees it with the process."""
    holder.kill()
    holder.wait()
    assert (tmp_path / FOLDER / "lock").exists()
    with exclusive(tmp_path, 10):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_lock_stays_beside_a_manifest(tmp_path):
    """Where there is a manifest, its folder stays."""
    with exclusive(tmp_path, 10):
        manifest_path(tmp_path).write_text("{}")
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["lock", "manifest.json"]


@pytest.mark.install
def test_eight_at_once_are_one_after_the_other(tmp_path, own_code):
    """Many that make and remove the lock's file at the same time never hold it together."""
    (tmp_path / "counter").write_text("0")
    processes = [start(own_code(COUNT, tmp_path)) for _ in range(8)]
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0] * 8
    assert (tmp_path / "counter").read_text() == "160"


def test_it_is_as_accessible_as_the_folder(tmp_path):
    """Other users who may patch this vLLM can use the lock: umask and the first user's rights don't matter."""
    tmp_path.chmod(0o775)
    owner = (4321, 1234) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    os.chown(tmp_path, *owner)
    previous = os.umask(0o077)
    try:
        with exclusive(tmp_path, 10):
            made = [(tmp_path / FOLDER).stat(), (tmp_path / FOLDER / "lock").stat()]
    finally:
        os.umask(previous)
    assert [stat.S_IMODE(status.st_mode) for status in made] == [0o775, 0o664]
    assert [(status.st_uid, status.st_gid) for status in made] == [owner] * 2


def test_a_user_who_may_only_read_the_lock_can_hold_it(tmp_path, monkeypatch):
    """The lock's file may be another user's; what this one may write shows at the files themselves."""
    real = os.open

    def not_for_writing(path, flags, *args, **kwargs):
        if flags & os.O_RDWR and not flags & os.O_CREAT and Path(path).exists():
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *args, **kwargs)

    manifest_path(tmp_path).parent.mkdir()
    manifest_path(tmp_path).write_text("{}")
    (tmp_path / FOLDER / "lock").touch()
    monkeypatch.setattr(os, "open", not_for_writing)
    with exclusive(tmp_path, 0):
        pass
