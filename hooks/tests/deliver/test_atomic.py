"""Files are replaced as a whole, under their own name, and nothing is written through a link."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from kvplug_hooks.deliver.atomic import Look, leftover, look_of, stage, write
from kvplug_hooks.deliver.states import DeliveryError, Exit

ME = (os.getuid(), os.getgid())


@pytest.fixture
def shared(tmp_path):
    """A file in a cache."""
    path = tmp_path / "cache.py"
    path.write_bytes(b"old")
    path.chmod(0o640)
    return path


@pytest.mark.parametrize("link", ["hard", "symbolic", "symbolic to a symbolic"])
def test_h8_links_are_broken_and_not_written_through(tmp_path, shared, link):
    """The name gets a file of its own with the same mode; the one that it shared is untouched."""
    path = tmp_path / "module.py"
    if link == "hard":
        path.hardlink_to(shared)
    else:
        middle = tmp_path / "middle"
        middle.symlink_to(shared)
        path.symlink_to(middle if "to a" in link else shared)
    before = shared.stat()

    write(path, b"new", look_of(path))

    assert path.read_bytes() == b"new"
    assert not path.is_symlink()
    assert path.stat().st_nlink == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert shared.read_bytes() == b"old"
    assert (shared.stat().st_ino, shared.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert sorted(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("mode", [0o444, 0o600, 0o755, 0o664])
def test_mode_and_owner_are_kept(shared, mode):
    """Whatever the umask, the new file is as accessible as the old one was."""
    shared.chmod(mode)
    owner = (4321, 1234) if os.geteuid() == 0 else ME
    os.chown(shared, *owner)
    previous = os.umask(0o077)
    try:
        write(shared, b"new", look_of(shared))
    finally:
        os.umask(previous)
    status = shared.stat()
    assert (stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid)) == (mode, owner)


def test_an_owner_that_cannot_be_kept_is_refused(shared, monkeypatch):
    """Rather than give a file to another user, nothing is done, and the sentence says who may."""

    def forbidden(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", forbidden)
    with pytest.raises(DeliveryError, match=r"belongs to user 1 and group 2.*run kvplug-hooks as that user") as caught:
        write(shared, b"new", Look(0o644, 1, 2))
    assert caught.value.code == Exit.READ_ONLY
    assert shared.read_bytes() == b"old"
    assert not leftover(shared).exists()


def test_a_full_disk_leaves_the_old_file_and_nothing_else(shared, monkeypatch):
    """Half of the bytes are written when the disk is full: the name still has the old file."""
    real = os.write

    def full(descriptor, data):
        if len(data) <= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(shared, b"newer", look_of(shared))
    monkeypatch.undo()
    assert shared.read_bytes() == b"old"
    assert not leftover(shared).exists()


def test_short_writes_are_completed(shared, monkeypatch):
    """The system may take fewer bytes than it is given."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:1]))
    write(shared, b"all of it", look_of(shared))
    assert shared.read_bytes() == b"all of it"


def test_what_an_interrupted_operation_left_is_in_nobodys_way(tmp_path, shared):
    """A left file, even a link that somebody planted there, is removed and not written to."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    leftover(shared).symlink_to(victim)
    stage(shared, b"new", look_of(shared)).commit()
    assert (victim.read_bytes(), shared.read_bytes()) == (b"precious", b"new")


def test_the_new_file_is_later_than_the_old_one(shared):
    """Python tells stale bytecode by the second: two files of one name never have the same."""
    future = int(shared.stat().st_mtime) + 3600
    os.utime(shared, (future, future))
    write(shared, b"new", look_of(shared))
    assert int(shared.stat().st_mtime) > future
