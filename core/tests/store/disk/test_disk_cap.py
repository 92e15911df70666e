"""The disk tier's directory stays below its cap at all times, and keeps what is used."""

from __future__ import annotations

import fcntl
import os
import threading
import time

import disk_support as disk
import pytest
from disk_support import get, held, keys, new_tier, put, size_for

from kvplug.store.l2.disk import files, reading, space
from kvplug.store.l2.disk import ledger as ledger_module


@pytest.fixture
def always_mark(monkeypatch):
    """Mark values each time they are used, not once a second."""
    monkeypatch.setattr(reading, "_MARK_NS", 0)


def test_i4_the_cap_holds_while_ten_times_as_much_is_written(tmp_path, monkeypatch):
    """With a cap of 10 blocks and 100 written, what `du` counts is never above it: before, in and after each write."""
    cap, seen = size_for(10), []
    write = files.write_buffered

    def watched(descriptor, value, done=0):
        seen.append(disk.on_disk(tmp_path))
        write(descriptor, value, done)
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


def test_a_file_that_is_being_written_is_not_swept(tmp_path, monkeypatch):
    """Engines that start, and look for dead writers' files, leave alone what a slow writer is still writing."""
    writing, go_on, write = threading.Event(), threading.Event(), files.write_buffered

    def slow(descriptor, value, done=0):
        writing.set()
        assert go_on.wait(30)
        write(descriptor, value, done)

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
