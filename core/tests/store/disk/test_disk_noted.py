"""Values that were noted to go next: what is done with them until room is wanted decides."""

from __future__ import annotations

import os
import time

import disk_support as disk
import pytest
from disk_support import get, held, keys, new_tier, put


@pytest.mark.parametrize("what", ["left alone", "used", "put again", "replaced", "deleted"])
def test_i4_what_was_noted_goes_only_as_it_was(tmp_path, what):
    """A noted value that has been used since, or is another one now, stays, and the next one goes.

    Those that are left alone are the control: they go, in the order in which they were used.
    """
    tier, other = new_tier(tmp_path, 32), new_tier(tmp_path, 32)
    put(tier, *keys(60))
    there = held(tier, *keys(60))
    hour_ago = time.time_ns() - 3600 * 10**9
    for number, key in enumerate(there):
        os.utime(disk.value_file(tmp_path, key), ns=(hour_ago + number,) * 2)
    tier._space._oldest = []  # what was noted before
    for key in keys(5, b"new"):  # there may be a rest of room
        if held(tier, there[0]):
            put(tier, key)
    assert held(tier, *there) == there[1:]
    noted = [value.path for value, _ in reversed(tier._space._oldest)]
    assert noted == [str(disk.value_file(tmp_path, key)) for key in there[1 : 1 + len(noted)]]
    assert len(noted) >= 2

    match what:
        case "used":
            assert get(other, there[1]) == disk.content(there[1])
        case "put again":
            assert put(other, there[1]) == [True]
        case "replaced":
            other.delete([there[1]], disk.TIMEOUT)
            put(other, there[1])
        case "deleted":
            other.delete([there[1]], disk.TIMEOUT)
            put(other, b"in its place")
    put(tier, b"newer")
    kept = what not in ("left alone", "deleted")
    gone = there[1:2] if what == "left alone" else there[2:3] if kept else there[1:3]
    assert held(tier, *there[1:]) == [key for key in there[1:] if key not in gone]
    assert get(tier, there[1]) == (disk.content(there[1]) if kept else None)
    for each in (tier, other):
        each.close()
