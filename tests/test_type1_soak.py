"""Long runs: thousands of short requests through one engine, and what it holds stays flat (B6, C13, I3).

A failure names the seed and the number of requests: `make soak ARGS="--seed S --requests N"` repeats it.
"""

from __future__ import annotations

import pytest

from support import engines
from support.llm import compare
from support.soak import RUNNER_SETTINGS, Leak, replay, soak

pytestmark = pytest.mark.engine

#: Where a hit changes how a prompt is split into steps, sums run in another order.
CLOSE = 1e-5

#: Test id to what is run: together a few thousand requests.
RUNS = {
    "v1": {"requests": 1500, "seed": 1},
    "v1-asynchronous": {"requests": 1250, "seed": 2, "asynchronous": True},
    "v2": {"requests": 60, "seed": 3},
    "v1-disk": {"requests": 600, "seed": 5, "round_size": 100},
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Return the folder of the samples that the runs leave, one file each."""
    return tmp_path_factory.mktemp("samples")


@pytest.mark.parametrize("name", RUNS)
def test_b6_c13_i3_nothing_grows(models, samples, tmp_path, name):
    """Over an L1 of 16 blocks that evicts all the time, with aborts, preemptions and resets, nothing grows or stays.

    Nor with an L2 tier behind it that evicts, too, and never has more than it may.

    That is: memory, descriptors, threads, vLLM's blocks in use, pins, copies under way, requests tracked, block
    tables, and every container of the scheduler half, the worker half and the dispatcher.
    """
    runner = name[:2]
    arguments = RUNNER_SETTINGS[runner] | RUNS[name]
    disk = str(tmp_path / "l2") if name.endswith("disk") else None
    report = engines.run(
        soak, runner=runner, timeout=400, model=models("llama"), samples=str(samples / name), disk=disk, **arguments
    )
    print(f"seed {arguments['seed']}: {report.line()}")
    assert report.problems == []
    assert report.requests == arguments["requests"]
    assert report.last.items, "no container was looked at"
    # It was a soak: for 100 requests, so many of everything.
    hundreds = report.requests / 100
    assert report.aborted > 5 * hundreds
    assert report.preemptions > 1 * hundreds
    assert report.local_resets > 0
    assert report.counts["blocks_evicted"] > 100 * hundreds
    assert report.counts["blocks_hit"] > 5 * hundreds
    assert report.samples > 3 * hundreds
    if disk:
        assert report.counts["l2_blocks_read:disk"] > 20 * hundreds
        assert report.counts["l2_blocks_written:disk"] > 100 * hundreds
        assert report.counts["l2_damaged:disk"] == report.counts["l2_errors:disk"] == 0
    if report.requests > 1000:
        assert report.all_resets > 1


def test_samples_equal_a_plain_engines(models, samples):
    """What the runs answered, at random samples, is what an engine without a connector answers."""
    files = sorted(str(samples / name) for name in RUNS if (samples / name).exists())
    assert files, "the runs come first"
    ours, plain = engines.run(replay, timeout=300, model=models("llama"), samples=files)
    assert len(ours) > 3 * len(files)
    compare(ours, plain, atol=CLOSE)


def test_the_controls(models, tmp_path):
    """Each fault that is put in (`Leak`) is noticed: what stays for a request, and other bytes in what is loaded."""
    file = str(tmp_path / "samples")
    report = engines.run(
        soak,
        timeout=300,
        model=models("llama"),
        samples=file,
        requests=180,
        seed=4,
        round_size=60,
        warm_rounds=1,
        leaks=[leak for leak in Leak if leak is not Leak.DISK],
    )
    print(report.line(), *report.problems, sep="\n")
    noticed = "\n".join(report.problems)
    for leak, line in {
        Leak.REQUESTS: "requests tracked when idle",
        Leak.PINS: "pins",
        Leak.MEMORY: "memory has grown",
        Leak.OBJECTS: "objects instead of 60: support.soak.leaks._Kept",
        Leak.DESCRIPTORS: "descriptors instead of",
        Leak.THREADS: "threads instead of",
    }.items():
        assert line in noticed, leak.value
    assert "instead of 61: scheduler half._scheduler._tracked" in noticed
    ours, plain = engines.run(replay, timeout=300, model=models("llama"), samples=[file])
    with pytest.raises(AssertionError, match="request"):
        compare(ours, plain, atol=CLOSE)


def test_the_control_of_the_disk(models, tmp_path):
    """What stays in L2's folder is noticed once it is more than the tier may have."""
    report = engines.run(
        soak,
        timeout=300,
        model=models("llama"),
        samples=str(tmp_path / "samples"),
        requests=60,
        seed=6,
        round_size=60,
        warm_rounds=1,
        disk=str(tmp_path / "l2"),
        leaks=[Leak.DISK],
    )
    assert "bytes on disk instead of at most" in "\n".join(report.problems)
