"""What others do to the directory of a disk tier: they delete, and they put things there."""

from __future__ import annotations

import os
import shutil

import disk_support as disk
import pytest
from disk_support import get, held, keys, new_tier, put, size_for

from kvplug.store.l2.disk import files
from kvplug.store.l2.tier import TierError


def test_deletion_of_values_from_outside(tmp_path):
    """Values deleted from outside are misses, and their room is found again when it is needed."""
    tier = new_tier(tmp_path, 10)
    put(tier, *keys(9))
    for path in disk.value_files(tmp_path):
        path.unlink()
    assert held(tier, *keys(9)) == []
    assert get(tier, keys(9)[0]) is None
    tier.delete(keys(9), disk.TIMEOUT)
    assert put(tier, *keys(9, b"new")) == [True] * 9
    assert held(tier, *keys(9, b"new")) == keys(9, b"new")
    assert disk.on_disk(tmp_path) <= size_for(10)
    tier.close()


@pytest.mark.parametrize("what", ["kvplug-disk-1/values-1", "kvplug-disk-1/temporary", "kvplug-disk-1", "."])
def test_deletion_of_directories_from_outside(tmp_path, what):
    """Whatever is deleted is made again by the next write, in all engines, and they go on sharing it."""
    root = tmp_path / "tier"
    one, other = new_tier(root, 10), new_tier(root, 10)
    put(one, b"a")
    shutil.rmtree(root / what)
    assert put(one, b"b") == [True]
    assert put(other, b"c") == [True]
    assert get(one, b"c") == disk.content(b"c")
    assert get(other, b"b") == disk.content(b"b")
    for index, tier in enumerate((one, other) * 20):
        put(tier, b"%d" % index)
    assert disk.on_disk(root) <= size_for(10)
    assert one.usage(disk.TIMEOUT) == other.usage(disk.TIMEOUT)
    for tier in (one, other):
        tier.close()


def test_everything_deleted_from_outside_in_the_middle_of_a_write(tmp_path, monkeypatch):
    """A value whose file is deleted while it is written isn't kept, and nothing else goes wrong."""
    tier, write = new_tier(tmp_path / "tier", 10), files.write_buffered

    def write_and_delete(descriptor, value, done=0):
        write(descriptor, value, done)
        shutil.rmtree(tmp_path / "tier")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_buffered", write_and_delete)
        assert put(tier, b"a") == [False]
    assert held(tier, b"a") == []
    assert put(tier, b"a") == [True]
    assert get(tier, b"a") == disk.content(b"a")
    assert tier.usage(disk.TIMEOUT).entries == 1
    assert disk.temporary_files(tmp_path / "tier") == []
    tier.close()


def test_foreign_files_are_left_alone(tmp_path):
    """Files and directories that aren't the tier's are neither counted nor evicted, wherever they are."""
    tier = new_tier(tmp_path, 10)
    put(tier, b"a")
    usage = tier.usage(disk.TIMEOUT)
    base = tmp_path / "kvplug-disk-1"
    folders = [tmp_path, base, base / "temporary", base / "values-1", base / "values-1" / "000"]
    foreign = [folder / name for folder in folders for name in ("notes.txt", "0-x", "ABCD")]
    for path in foreign:
        path.write_bytes(bytes(disk.BLOCK * 4))
    (base / "values-1" / "000" / "c0ffee").mkdir()
    tier.close()
    (base / "ledger").unlink()
    tier = new_tier(tmp_path, 10)
    assert tier.usage(disk.TIMEOUT) == usage
    assert put(tier, *keys(40)) == [True] * 40
    assert all(path.stat().st_size == disk.BLOCK * 4 for path in foreign)
    tier.close()


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "dangling link"])
def test_what_is_no_file_is_a_miss(tmp_path, kind):
    """Something else in a value's place is a miss, is not waited for, and isn't followed."""
    tier = new_tier(tmp_path)
    put(tier, b"a")
    path = disk.value_file(tmp_path, b"a")
    path.unlink()
    secret = tmp_path / "secret"
    secret.write_bytes(disk.content(b"a"))
    {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(secret),
        "dangling link": lambda: path.symlink_to(tmp_path / "nowhere"),
    }[kind]()
    assert get(tier, b"a") is None
    assert held(tier, b"a") == []
    tier.delete([b"a"], disk.TIMEOUT)
    if kind == "directory":
        with pytest.raises(TierError, match="check the disk"):
            put(tier, b"a")
        assert disk.temporary_files(tmp_path) == []
    else:
        assert put(tier, b"a") == [True]
        assert get(tier, b"a") == disk.content(b"a")
        assert not path.is_symlink()
    tier.close()
