"""The disk tier's directory stays below its cap at all times, and keeps what is used."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time

import disk_support as disk
import pytest
from disk_support import get, held, new_tier, put, size_for

from kvplug.store.l2.disk import files, reading, space
from kvplug.store.l2.disk import ledger as ledger_module
from kvplug.store.l2.tier import TierError


def keys(number, prefix=b"key"):
    return [b"%s %04d" % (prefix, index) for index in range(number)]


@pytest.fixture
def always_mark(monkeypatch):
    """Mark values each time they are used, not once a second."""
    monkeypatch.setattr(reading, "_MARK_NS", 0)


def test_i4_the_cap_holds_while_ten_times_as_much_is_written(tmp_path, monkeypatch):
    """With a cap of 10 blocks and 100 written, what `du` counts is never above it: before, in and after each write."""
    cap, seen = size_for(10), []
    write = files.write_buffered

    def watched(descriptor, value):
        seen.append(disk.on_disk(tmp_path))
        write(descriptor, value)
        seen.append(disk.on_disk(tmp_path))

    monkeypatch.setattr(files, "write_buffered", watched)
    tier = new_tier(tmp_path, 10)
    for key in keys(100):
        assert put(tier, key) == [True]
        seen.append(disk.on_disk(tmp_path))
    # Not counting what is already there: the directory of the test.
    assert len(seen) == 300
    assert max(seen) <= cap
    assert held(tier, *keys(100)) == keys(100)[-len(disk.value_files(tmp_path)) :]
    assert len(disk.value_files(tmp_path)) >= 9
    tier.close()


def test_i4_a_batch_larger_than_the_cap(tmp_path):
    """A batch of which only a part fits leaves its last blocks, and the cap holds."""
    tier = new_tier(tmp_path, 10)
    assert put(tier, *keys(64)) == [True] * 64
    assert disk.on_disk(tmp_path) <= size_for(10)
    assert held(tier, *keys(64)) == keys(64)[-len(disk.value_files(tmp_path)) :]
    tier.close()


def test_a_value_larger_than_the_cap_evicts_nothing(tmp_path):
    """What can never fit is refused, and what is there stays."""
    tier = new_tier(tmp_path, 4)
    put(tier, *keys(3))
    assert put(tier, b"huge", length=disk.BLOCK * 8) == [False]
    assert held(tier, *keys(3)) == keys(3)
    tier.close()


_WRITER = """
    import sys, pathlib
    from disk_support import new_tier, put, get, content, BLOCK
    root, name, blocks = pathlib.Path(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
    tier = new_tier(root, 20)
    kept = found = 0
    for index in range(blocks):
        key = b"%s %d" % (name, index)
        kept += put(tier, key)[0]
        value = get(tier, key)
        assert value is None or value == content(key)
        found += value is not None
    print(kept, found)
"""


def test_i4_two_processes_under_one_cap(tmp_path):
    """Two processes that write 15 times the cap together never exceed it, and find what they have just written."""
    root, cap = tmp_path / "tier", size_for(20)
    processes = [disk.start(_WRITER, root, name, 150) for name in ("one", "other")]
    most = samples = 0
    while any(process.poll() is None for process in processes):
        if (root / "kvplug-disk-1" / "ledger").exists():
            # While nothing can change its name, or a walk might count it twice; what is being written goes on growing.
            with (root / "kvplug-disk-1" / "ledger").open("rb") as ledger:
                fcntl.flock(ledger, fcntl.LOCK_EX)
                most, samples = max(most, disk.on_disk(root)), samples + 1
        time.sleep(0.005)
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        kept, found = map(int, output.split())
        assert kept == 150
        assert found > 0
    assert samples > 5
    assert most <= cap
    tier = new_tier(root, 20)
    assert disk.on_disk(root) <= tier.usage(disk.TIMEOUT).used_bytes <= cap
    assert tier.usage(disk.TIMEOUT).entries == len(disk.value_files(root)) >= 18
    assert disk.temporary_files(root) == []
    tier.close()


def test_i4_restart_on_a_full_directory(tmp_path):
    """After a restart what was there is found, and the cap holds when more is written."""
    tier = new_tier(tmp_path, 10)
    put(tier, *keys(10))
    kept, usage = held(tier, *keys(10)), tier.usage(disk.TIMEOUT)
    tier.close()
    tier = new_tier(tmp_path, 10)
    assert tier.usage(disk.TIMEOUT) == usage
    assert held(tier, *keys(10)) == kept
    put(tier, *keys(30, b"more"))
    assert disk.on_disk(tmp_path) <= size_for(10)
    tier.close()


def test_i4_restart_with_a_smaller_cap(tmp_path):
    """A directory that is fuller than a new cap is brought below it when the tier is opened; the newest stay."""
    tier = new_tier(tmp_path, 20)
    put(tier, *keys(20))
    tier.close()
    tier = new_tier(tmp_path, 5)
    assert disk.on_disk(tmp_path) <= size_for(5)
    assert held(tier, *keys(20)) == keys(20)[-len(disk.value_files(tmp_path)) :]
    tier.close()


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut", "flipped", "longer", "of another boot"])
def test_i4_the_index_is_rebuilt(tmp_path, monkeypatch, damage):
    """Without a ledger that can be trusted, all is counted again: nothing is lost, and the cap holds."""
    tier = new_tier(tmp_path, 10)
    put(tier, *keys(9))
    usage = tier.usage(disk.TIMEOUT)
    tier.close()
    ledger = tmp_path / "kvplug-disk-1" / "ledger"
    good = ledger.read_bytes()
    if damage == "deleted":
        ledger.unlink()
    elif damage == "of another boot":
        monkeypatch.setattr(ledger_module, "_boot_id", lambda: b"another boot")
    else:
        bad = {"emptied": b"", "cut": good[:-1], "longer": good + b"\0", "flipped": bytes([good[0] ^ 1]) + good[1:]}
        ledger.write_bytes(bad[damage])
    tier = new_tier(tmp_path, 10)
    assert tier.usage(disk.TIMEOUT) == usage
    assert held(tier, *keys(9)) == keys(9)
    put(tier, *keys(30, b"more"))
    assert disk.on_disk(tmp_path) <= size_for(10)
    tier.close()


def test_counting_goes_on_over_calls(tmp_path, monkeypatch):
    """While a large directory is being counted, values are read, not written; calls go on where the last one ended."""
    tier = new_tier(tmp_path, 300)  # four shards
    put(tier, b"old")
    tier.close()
    monkeypatch.setattr(ledger_module, "_boot_id", lambda: b"another boot")
    monkeypatch.setattr(space, "_LOCKED_SECONDS", -1.0)  # one area in a go
    settings = disk.DiskTier.Settings(disk_path=tmp_path, disk_size=size_for(300))
    tier = disk.DiskTier(settings)
    tier.open(max_value_bytes=disk.BLOCK, timeout=0)
    assert tier.usage(disk.TIMEOUT).used_bytes is None
    assert get(tier, b"old") == disk.content(b"old")
    monkeypatch.setattr(space, "_LOCKED_SECONDS", 0.05)
    assert put(tier, b"new") == [True]
    assert tier.usage(disk.TIMEOUT).entries == 2
    tier.close()


def test_what_was_read_stays(tmp_path, always_mark):
    """Values that were read, or put again, outlive others, whichever engine used them."""
    one, other = new_tier(tmp_path, 10), new_tier(tmp_path, 10)
    put(one, *keys(8))
    assert get(other, keys(8)[0])
    put(other, keys(8)[1])
    put(one, *keys(5, b"more"))
    assert held(one, *keys(8))[:2] == keys(8)[:2]
    assert len(held(one, *keys(8))) < 8
    for tier in (one, other):
        tier.close()


def test_use_is_written_down_once_a_second(tmp_path, monkeypatch):
    """A value that is read again and again isn't marked each time: a mark is a write to the disk."""
    tier, marks = new_tier(tmp_path), []
    put(tier, b"a")
    monkeypatch.setattr(reading, "mark", marks.append)
    for _ in range(5):
        get(tier, b"a")
    assert marks == []
    os.utime(disk.value_file(tmp_path, b"a"), ns=(0, 0))
    get(tier, b"a")
    assert len(marks) == 1
    tier.close()


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

    def write_and_delete(descriptor, value):
        write(descriptor, value)
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


def test_a_file_that_is_being_written_is_not_swept(tmp_path, monkeypatch):
    """Engines that start, and look for dead writers' files, leave alone what a slow writer is still writing."""
    writing, go_on, write = threading.Event(), threading.Event(), files.write_buffered

    def slow(descriptor, value):
        writing.set()
        assert go_on.wait(30)
        write(descriptor, value)

    monkeypatch.setattr(files, "write_buffered", slow)
    tier, kept = new_tier(tmp_path, 10), []
    thread = threading.Thread(target=lambda: kept.extend(put(tier, b"slow")))
    thread.start()
    assert writing.wait(30)
    (tmp_path / "kvplug-disk-1" / "ledger").unlink()  # so that the other one has to count
    other = new_tier(tmp_path, 10)
    assert len(disk.temporary_files(tmp_path)) == 1
    assert other.usage(disk.TIMEOUT).used_bytes > disk.BLOCK
    go_on.set()
    thread.join()
    assert kept == [True]
    assert get(other, b"slow") == disk.content(b"slow")
    tier.close()
    other.close()


def test_evicted_files_are_written_over(tmp_path, monkeypatch):
    """A full directory goes on with the files that it has: same inodes, new values; but not those in use."""
    tier = new_tier(tmp_path, 10)
    put(tier, *keys(30))

    def inodes():
        return {path.stat().st_ino for path in disk.value_files(tmp_path)}

    for path in disk.value_files(tmp_path):
        os.utime(path, ns=(path.stat().st_mtime_ns - 60 * 10**9,) * 2)
    before, number = inodes(), len(disk.value_files(tmp_path))
    with disk.value_file(tmp_path, held(tier, keys(30)[-1])[0]).open("rb"):
        assert put(tier, *keys(number, b"new")) == [True] * number
    assert inodes() == before
    assert all(get(tier, key) == disk.content(key) for key in keys(number, b"new"))
    assert disk.on_disk(tmp_path) <= size_for(10)

    monkeypatch.setattr(files, "write_over", None)  # all were used just now
    assert put(tier, b"one more") == [True]
    tier.close()


def test_a_read_that_took_too_long_is_a_miss(tmp_path, monkeypatch):
    """What was read for longer than files are left alone may be something else."""
    tier = new_tier(tmp_path)
    put(tier, b"a")
    monkeypatch.setattr(reading, "LONGEST_READ", 0.0)
    assert get(tier, b"a") is None
    tier.close()
