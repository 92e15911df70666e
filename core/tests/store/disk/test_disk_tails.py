"""Values that end within a page, written past the page cache and through it."""

from __future__ import annotations

import mmap
import os
import time

import disk_support as disk
import pytest
from disk_support import TIMEOUT, held, keys, new_tier

from kvplug.store.l2.disk import files
from kvplug.store.l2.disk.files import PAGE

LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 3000, 4 * PAGE - 1]


def _aligned(content):
    """Return memory on a page boundary that begins with some bytes; behind them it is filled with another one."""
    memory = memoryview(mmap.mmap(-1, 5 * PAGE))
    memory[:] = b"\xee" * len(memory)
    memory[: len(content)] = content
    return memory


def _put(tier, names, length):
    values = [_aligned(disk.content(name, length))[:length] for name in names]
    assert list(tier.put(names, values, TIMEOUT)) == [True] * len(names)


def _read(tier, names, length):
    """Read values into aligned memory, see that nothing behind them was written to, and return them."""
    buffers = [_aligned(b"") for _ in names]
    assert list(tier.get(names, buffers, TIMEOUT)) == [length] * len(names)
    assert all(bytes(buffer[length:]) == b"\xee" * (len(buffer) - length) for buffer in buffers)
    return [bytes(buffer[:length]) for buffer in buffers]


@pytest.fixture
def calls(monkeypatch):
    """Count the calls that go past the page cache, and those that write over a file."""
    calls = []
    for name in ("write_direct", "read_direct", "write_over"):
        inner = getattr(files, name)
        monkeypatch.setattr(files, name, lambda *args, name=name, inner=inner: calls.append(name) or inner(*args))
    return calls


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_values_of_any_length_are_whole_in_new_and_reused_files(tmp_path, calls, length, direct):
    """Whatever part of a page a value ends in, both ways of reading give back its bytes, and no other.

    So they do for values that were written over the files of others, whose bytes were others to the last.
    """
    tier, other = new_tier(tmp_path, 4, direct=direct), new_tier(tmp_path, 4, direct=not direct)
    _put(tier, keys(60, b"old"), length)
    old = held(tier, *keys(60, b"old"))
    assert len(old) < 60
    for each in (tier, other):
        assert _read(each, old, length) == [disk.content(key, length) for key in old]
    assert calls.count("read_direct") == len(old)
    assert calls.count("write_direct") == (60 if direct else 0)
    assert "write_over" not in calls  # nothing that was used just now is written over

    hour_ago = time.time_ns() - 3600 * 10**9
    inodes = set()
    for key in old:
        path = disk.value_file(tmp_path, key)
        os.utime(path, ns=(hour_ago,) * 2)
        inodes.add(path.stat().st_ino)
    new = keys(len(old), b"NEW")
    _put(tier, new, length)
    assert {disk.value_file(tmp_path, key).stat().st_ino for key in new} == inodes
    assert calls.count("write_over") == len(new)
    for each in (tier, other):
        assert _read(each, new, length) == [disk.content(key, length) for key in new]
        assert _read(each, new, length) != [disk.content(key, length) for key in old]
        each.close()
