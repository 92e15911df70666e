"""What a disk tier refuses when it is opened, and what it says."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile

import disk_support as disk
import pytest
from disk_support import new_tier
from pydantic import ValidationError

from kvplug.store.l2.disk import DiskTier
from kvplug.store.l2.tier import TierError

_UNWRITABLE = """
    import os, sys, pathlib
    from disk_support import new_tier, put, get, content, TIMEOUT
    from kvplug.store.l2.tier import TierError
    root = pathlib.Path(sys.argv[1])
    if os.geteuid() == 0:
        os.chmod(root, 0o777)
        os.setgid(65534), os.setuid(65534)  # permissions don't hold for root
    tier = new_tier(root / "tier", 10)
    put(tier, b"a")
    folders = [root / "tier/kvplug-disk-1", *root.glob("tier/kvplug-disk-1/*"), *root.glob("tier/kvplug-disk-1/*/*")]
    for folder in folders:
        folder.is_dir() and folder.chmod(0o500)
    os.utime(next(root.glob("tier/kvplug-disk-1/*/*/*")), ns=(0, 0))
    try:
        put(tier, b"b")
    except TierError as error:
        print(error)
    assert get(tier, b"a") == content(b"a")
    tier.close()
    for folder in folders:
        folder.is_dir() and folder.chmod(0o700)
    root.joinpath("tier").chmod(0o500)
    try:
        new_tier(root / "tier" / "below", 10)
    except TierError as error:
        print(error)
    root.joinpath("tier").chmod(0o700)
"""


def test_an_unwritable_directory():
    """A directory that can't be written to is an error that says what to do; what is in it can still be read."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to the user that the program becomes
        lines = disk.run(_UNWRITABLE, folder).splitlines()
    assert len(lines) == 2
    assert "can't be written to (Permission denied): make it writable for this process" in lines[0]
    assert "can't be opened (Permission denied): make it writable for this process" in lines[1]


def test_a_directory_that_is_a_file(tmp_path):
    """A path that is no directory is an error that names it."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        TierError, match=r"file can't be opened \(File exists|Not a directory\): set disk_path to a dir"
    ):
        new_tier(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_cap_too_small_for_one_block(tmp_path):
    """A cap in which no block fits is an error that names both."""
    with pytest.raises(
        TierError, match=r"disk_size is \d+ bytes, in which no block of 1048576 bytes fits: set a larger"
    ):
        new_tier_of_size(tmp_path, 1 << 20, 1 << 20)


def new_tier_of_size(root, size, block):
    before = disk.descriptors()
    try:
        DiskTier(DiskTier.Settings(disk_path=root, disk_size=size)).open(max_value_bytes=block, timeout=disk.TIMEOUT)
    finally:
        assert disk.descriptors() == before


def test_direct_io_that_the_file_system_lacks(tmp_path, monkeypatch):
    """Asking for direct I/O where there is none is an error, not a slower tier."""
    really_open = os.open

    def without_direct(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, *args)

    monkeypatch.setattr(os, "open", without_direct)
    with pytest.raises(TierError, match="has no direct I/O: set disk_direct to false"):
        new_tier(tmp_path, direct=True)


def test_a_disk_smaller_than_the_cap_is_said_at_start(tmp_path, caplog):
    """A cap beyond what the file system has is a warning with both numbers."""
    there = shutil.disk_usage(tmp_path).total
    tier = DiskTier(DiskTier.Settings(disk_path=tmp_path, disk_size=there * 2))
    tier.open(max_value_bytes=disk.BLOCK, timeout=disk.TIMEOUT)
    assert any(f"disk_size is {there * 2} bytes" in record.getMessage() for record in caplog.records)
    tier.close()


@pytest.mark.parametrize("path", ["relative/path", "", "a\0b"])
def test_a_path_that_isnt_absolute_is_refused(path):
    """A relative path would be another directory in each process."""
    with pytest.raises(ValidationError, match="disk_path"):
        DiskTier.Settings(disk_path=path)
