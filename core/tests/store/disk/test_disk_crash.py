"""Processes that are killed in the middle of a write leave nothing behind for long."""

from __future__ import annotations

import json
import time

import disk_support as disk
from disk_support import new_tier

BLOCK = 1 << 19

_KILLER = """
    import json, os, pathlib, random, signal, sys, time
    from disk_support import content, new_tier, on_disk, put, temporary_files, value_files
    root, block = pathlib.Path(sys.argv[1]), 1 << 19
    random.seed(1)

    def write(turn):
        tier = new_tier(root, 6, block=block)
        for index in range(10**6):
            put(tier, b"%03d %06d" % (turn, index), length=block)

    torn = most = values = 0
    for turn in range(100):
        old, child = set(temporary_files(root)), os.fork()
        if child == 0:
            write(turn)
        # Once it has written something, at any moment; every other time when a file is seen that is being written.
        while not any(path.name.startswith((b"%03d" % turn).hex()) for path in value_files(root)):
            time.sleep(0.001)
        while turn % 2 and not set(temporary_files(root)) - old:
            pass
        time.sleep(random.random() * (0.0002 if turn % 2 else 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += bool(temporary_files(root))
        most = max(most, on_disk(root))
        # The next engine at the directory, in another process: this one never opens it.
        for path in value_files(root):
            key = bytes.fromhex(path.name)
            assert path.read_bytes() == content(key, block), path
            values += 1
    print(json.dumps({"torn": torn, "most": most, "values": values}))
"""


def test_kill_9_in_the_middle_of_a_write_a_hundred_times(tmp_path):
    """Of 100 writers killed at any moment, every value under its name is whole, the cap holds, and torn files go."""
    root = tmp_path / "tier"
    before = disk.descriptors()
    result = json.loads(disk.run(_KILLER, root))
    assert result["torn"] >= 10, "the writers weren't killed in the middle of a write often enough"
    assert result["values"] >= 100
    assert result["most"] <= disk.size_for(6, BLOCK)
    tier = new_tier(root, 6, block=BLOCK)
    assert disk.temporary_files(root) == []
    # A writer that was killed between a file's number and the file has left one too many, until its shard is counted.
    assert tier.usage(disk.TIMEOUT).entries >= len(disk.value_files(root))
    assert disk.on_disk(root) <= tier.usage(disk.TIMEOUT).used_bytes <= disk.size_for(6, BLOCK)
    with tier._space.ledger.locked(time.monotonic() + disk.TIMEOUT) as counts:
        for shard in range(counts.shards):
            tier._space.count_area(counts, shard)
    assert tier.usage(disk.TIMEOUT).entries == len(disk.value_files(root))
    assert disk.on_disk(root) <= tier.usage(disk.TIMEOUT).used_bytes <= disk.size_for(6, BLOCK)
    tier.close()
    assert disk.descriptors() == before
