"""What goes wrong with a disk costs values, never more: nothing but `TierError` comes, and nothing is left."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import threading
import time

import disk_support as disk
import pytest
from disk_support import get, held, new_tier, put, size_for

from kvplug.store.l2.disk import DiskTier, files
from kvplug.store.l2.disk import tier as tier_module
from kvplug.store.l2.tier import TierError, TierTimeoutError


@pytest.fixture
def tier(tmp_path):
    before = disk.descriptors()
    tier = new_tier(tmp_path / "tier", 10)
    yield tier
    tier.close()
    assert disk.descriptors() == before
    assert disk.temporary_files(tmp_path / "tier") == []


@pytest.fixture
def fails(monkeypatch):
    """Let a call of the operating system fail, the first so many times."""

    def fail(name, number, times=1 << 30, where=lambda *_: True):
        call, left = getattr(os, name), [times]

        def failing(*args, **kwargs):
            if left[0] and where(*args):
                left[0] -= 1
                raise OSError(number, os.strerror(number), "somewhere")
            return call(*args, **kwargs)

        monkeypatch.setattr(os, name, failing)

    return fail


def is_value(descriptor, data, *_):
    """Say whether a write is one of a value, and not of the ledger's few bytes."""
    return len(data) > 1000


_FULL = """
    import subprocess, sys, pathlib
    from disk_support import new_tier, put, get, content, held, temporary_files, on_disk, BLOCK
    root = pathlib.Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", root], check=True)
    tier = new_tier(root, 100)  # of which the file system has room for 60
    keys = [b"%d" % index for index in range(200)]
    assert all(put(tier, key) == [True] for key in keys)
    kept = held(tier, *keys)
    assert kept == keys[-len(kept):], "not the oldest have made room"
    assert len(kept) > 30
    assert all(get(tier, key) == content(key) for key in kept)
    (root / "other").write_bytes(bytes(10))
    try:
        with open(root / "filler", "wb") as file:
            while True:
                file.write(bytes(4096)), file.flush()
    except OSError:
        pass
    assert put(tier, b"new") == [True]
    assert tier.usage(10).entries == len(held(tier, b"new", *keys))
    assert temporary_files(root) == []
    print(len(kept))
"""


def _can_mount():
    return os.geteuid() == 0 and shutil.which("unshare") and os.system("unshare -m true 2>/dev/null") == 0


@pytest.mark.may_skip_in_ci(
    "mounting takes root and a kernel that lets it; the same is tested with failing calls below"
)
@pytest.mark.skipif(not _can_mount(), reason="mounting a file system takes root")
def test_a_real_full_disk(tmp_path):
    """On a file system that is full before the cap, the oldest values make room for new ones."""
    assert int(disk.run(_FULL, tmp_path, prefix=("unshare", "-m"))) > 30


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_refuses_and_recovers(tier, fails, number, monkeypatch, caplog):
    """Where nothing can be written the value isn't kept, one warning says so, and later ones are kept again."""
    put(tier, b"old")
    monkeypatch.setattr(tier_module, "_limited", tier_module.RateLimited(tier_module.logger))
    fails("pwrite", number, times=3, where=is_value)
    assert put(tier, b"a") == [False]  # tried again, once "old" had made room
    assert put(tier, b"b") == [False]
    assert put(tier, b"c") == [True]
    assert held(tier, b"a", b"b", b"c") == [b"c"]
    warnings = [record.getMessage() for record in caplog.records if "is full" in record.getMessage()]
    assert len(warnings) == 1
    assert tier.place in warnings[0]


def test_a_full_disk_in_the_middle_of_a_batch(tier, fails):
    """What was written before the disk was full is kept, and the rest finds the room that older values make."""
    put(tier, b"old")
    calls = iter(range(100))
    fails("pwrite", errno.ENOSPC, times=1, where=lambda *args: is_value(*args) and next(calls) == 1)
    assert put(tier, b"a", b"b", b"c") == [True] * 3
    assert all(get(tier, key) == disk.content(key) for key in held(tier, b"a", b"b", b"c"))
    assert len(held(tier, b"old", b"a", b"b", b"c")) >= 2


def test_a_full_disk_has_no_inode_left(tier, fails):
    """A file that can't even be made is room that isn't there."""
    fails("open", errno.ENOSPC, where=lambda path, *_: "temporary/" in str(path))
    assert put(tier, b"a") == [False]


def test_a_limit_of_file_sizes(tmp_path, tier):
    """A value longer than the process may write is an error that names the limit; nothing of it is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (disk.BLOCK // 2, hard))
    try:
        with pytest.raises(TierError, match=r"can't be written to \(File too large\): .*ulimit -f"):
            put(tier, b"a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert disk.temporary_files(tmp_path / "tier") == []
    assert put(tier, b"a") == [True]


@pytest.mark.parametrize("call", ["pwrite", "rename", "open", "fstat"])
def test_eio_when_writing(tmp_path, tier, fails, call):
    """A disk that fails is an error that names the directory; afterwards all is as if nothing had happened."""
    put(tier, b"old")
    usage = tier.usage(disk.TIMEOUT)
    fails(call, errno.EIO, times=1)
    with pytest.raises(TierError, match=r"tier can't be written to \(Input/output error\): check the disk"):
        put(tier, b"a")
    assert get(tier, b"old") == disk.content(b"old")
    assert put(tier, b"b") == [True]
    assert tier.usage(disk.TIMEOUT).entries == usage.entries + 1
    assert tier.usage(disk.TIMEOUT).used_bytes <= size_for(10)


def test_eio_when_reading(tier, fails):
    """A value that can't be read is an error once; its file goes, so that it can be written again."""
    put(tier, b"a", b"b")
    fails("preadv", errno.EIO, times=1)
    with pytest.raises(TierError, match=r"can't be read \(Input/output error\)"):
        get(tier, b"a")
    assert get(tier, b"a") is None
    assert get(tier, b"b") == disk.content(b"b")
    assert put(tier, b"a") == [True]
    assert get(tier, b"a") == disk.content(b"a")


def test_descriptors_of_files_that_are_read_ahead(tier, monkeypatch):
    """When a batch that reads ahead fails, or is late, all its files are closed (the fixture counts them)."""
    keys = [b"%d" % index for index in range(6)]
    put(tier, *keys)
    monkeypatch.setattr(files, "read_cached", lambda *_: 0)  # as if nothing were in the page cache
    buffers = [memoryview(bytearray(disk.BLOCK)) for _ in keys]
    assert list(tier.get(keys, buffers, disk.TIMEOUT)) == [disk.BLOCK] * 6
    assert [bytes(buffer) for buffer in buffers] == [disk.content(key) for key in keys]
    before = disk.descriptors()
    with pytest.raises(TierTimeoutError, match="in time"):
        tier.get(keys, buffers, -1)
    monkeypatch.setattr(files, "read_buffered", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad")))
    with pytest.raises(TierError):
        tier.get(keys, buffers, disk.TIMEOUT)
    assert disk.descriptors() == before


def test_a_cut_file(tmp_path, tier):
    """A file that was cut short is returned with the length that it has, and is written anew when it is put."""
    put(tier, b"a")
    os.truncate(disk.value_file(tmp_path / "tier", b"a"), 100)
    assert get(tier, b"a") == disk.content(b"a")[:100]
    assert put(tier, b"a") == [True]
    assert get(tier, b"a") == disk.content(b"a")
    assert tier.usage(disk.TIMEOUT).entries == 1


def test_a_file_that_is_cut_while_it_is_read(tmp_path, tier, monkeypatch):
    """The length that is returned is what was read, not what the file once was."""
    put(tier, b"a")

    def cut(descriptor, buffer):
        os.truncate(disk.value_file(tmp_path / "tier", b"a"), 100)
        return 0

    monkeypatch.setattr(files, "read_cached", cut)
    assert get(tier, b"a") == disk.content(b"a")[:100]


def test_a_directory_that_vanished_with_its_parents(tmp_path, tier):
    """Only the directory itself is made again, not what it was in: that may have been another file system."""
    root = tmp_path / "tier"
    shutil.rmtree(tmp_path)
    assert get(tier, b"a") is None
    with pytest.raises(TierError, match=r"can't be written to \(No such file or directory\): make the directory"):
        put(tier, b"a")
    assert not root.exists()
    tmp_path.mkdir()
    assert put(tier, b"a") == [True]


def test_another_file_system_in_its_place(tmp_path, tier):
    """After its file system was unmounted nothing is written to what lies below."""
    shutil.rmtree(tmp_path / "tier")
    tier._space.ledger._device += 1
    with pytest.raises(TierError, match="is gone, and its file system with it: mount it again"):
        put(tier, b"a")
    (tmp_path / "tier").mkdir()
    with pytest.raises(TierError, match="is on another file system than before: mount the right one"):
        put(tier, b"a")
    assert list((tmp_path / "tier").iterdir()) == []


def test_a_process_that_was_stopped_with_the_lock(tmp_path, tier):
    """While another process has the ledger locked, writes are late, reads aren't; then all goes on."""
    put(tier, b"a")
    with (tmp_path / "tier" / "kvplug-disk-1" / "ledger").open("rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        for call in (
            lambda: tier.put([b"b"], [memoryview(b"b")], 0.01),
            lambda: tier.delete([b"a"], 0.01),
            lambda: tier.usage(0.01),
        ):
            with pytest.raises(TierTimeoutError, match="ledger was locked by another thread or process for too long"):
                call()
        with pytest.raises(TierTimeoutError):
            DiskTier(DiskTier.Settings(disk_path=tmp_path / "tier")).open(max_value_bytes=disk.BLOCK, timeout=0.01)
        assert get(tier, b"a") == disk.content(b"a")
        assert held(tier, b"a") == [b"a"]
    assert put(tier, b"b") == [True]


def test_a_process_that_was_forked_locks_for_itself(tier):
    """A child made by fork doesn't take its parent's lock for its own."""
    put(tier, b"a")
    with tier._space.ledger.locked(time.monotonic() + disk.TIMEOUT):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                tier._space.ledger._mutex = threading.Lock()  # held, as was the file's lock
                tier.delete([b"a"], 0.01)
            except TierTimeoutError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert put(tier, b"b") == [True]
