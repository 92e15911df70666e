"""Memory: what all ranks of a machine ask for, against what it has."""

from types import SimpleNamespace

import pytest

from kvplug import memory_budget
from kvplug.errors import ConfigError
from kvplug.memory_budget import check_memory, machine_memory, ranks_on_host

GIB = 1 << 30


@pytest.fixture
def lines(monkeypatch):
    """Collect what is logged, as if nothing had been logged in this process yet."""
    collected = []
    monkeypatch.setattr(memory_budget, "_logged", set())
    monkeypatch.setattr(memory_budget.logger, "info", lambda message, *args: collected.append(message % args))
    return collected


def make_machine(root, *, memory=None, groups="", limits=None):
    """Make a /proc and a /sys: the memory in bytes, the lines of the process's groups, and limits by path."""
    (root / "proc" / "self").mkdir(parents=True)
    if memory is not None:
        (root / "proc" / "meminfo").write_text(f"MemTotal:       {memory // 1024} kB\nMemFree:  5 kB\n")
    (root / "proc" / "self" / "cgroup").write_text(groups)
    for path, limit in (limits or {}).items():
        file = root / "sys" / "fs" / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return root


@pytest.mark.parametrize(
    ("memory", "groups", "limits", "expected"),
    [
        (64 * GIB, "", {}, 64 * GIB),
        # Version 2, in the host's view: the group's own limit, and those above it.
        (64 * GIB, "0::/a/b\n", {"a/b/memory.max": 8 * GIB, "a/memory.max": "max"}, 8 * GIB),
        (64 * GIB, "0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": 4 * GIB}, 4 * GIB),
        (64 * GIB, "0::/a/b\n", {"a/b/memory.max": 8 * GIB, "a/memory.max": 4 * GIB}, 4 * GIB),
        # Version 2, in a container: its own group is the top.
        (64 * GIB, "0::/\n", {"memory.max": 8 * GIB}, 8 * GIB),
        (64 * GIB, "0::/host/path\n", {"memory.max": 8 * GIB}, 8 * GIB),
        # Version 1, where no limit is a number too.
        (64 * GIB, "4:cpu:/x\n9:memory:/y\n", {"memory/y/memory.limit_in_bytes": 2 * GIB}, 2 * GIB),
        (64 * GIB, "9:memory:/y\n", {"memory/y/memory.limit_in_bytes": 9223372036854771712}, 64 * GIB),
        (64 * GIB, "9:memory:/host\n", {"memory/memory.limit_in_bytes": 3 * GIB}, 3 * GIB),
        # Both.
        (64 * GIB, "9:memory:/\n0::/a\n", {"memory/memory.limit_in_bytes": 3 * GIB, "a/memory.max": 2 * GIB}, 2 * GIB),
        # A limit that the machine doesn't have.
        (64 * GIB, "0::/\n", {"memory.max": 128 * GIB}, 64 * GIB),
        (None, "0::/\n", {"memory.max": 8 * GIB}, 8 * GIB),
        (None, "", {}, None),
    ],
)
def test_machine_memory(tmp_path, memory, groups, limits, expected):
    """The memory is the machine's, or the limit of the process's control group or one above it, if that's smaller."""
    assert machine_memory(make_machine(tmp_path, memory=memory, groups=groups, limits=limits)) == expected


def test_this_machine_has_memory():
    """Here, the memory is known."""
    memory = machine_memory()
    assert memory is not None
    assert memory > GIB // 4


def test_macos_has_no_proc(tmp_path, monkeypatch):
    """Where there is no /proc, the system's own count of pages is used, and where that isn't known either, nothing."""
    monkeypatch.setattr(memory_budget, "_lines", lambda file: [])
    monkeypatch.setattr(memory_budget.os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert machine_memory() == 4096000

    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(memory_budget.os, "sysconf", unknown)
    assert machine_memory() is None


def test_the_budget_is_logged_once(tmp_path, lines):
    """What is asked for per rank and in total is logged, once for all roles of a process."""
    root = make_machine(tmp_path, memory=64 * GIB)
    for _ in range(3):
        check_memory(4 * GIB, 8, what="L1", root=root)
    assert lines == ["kvplug: L1: 4.00 GiB per rank, 32.00 GiB in total on this machine (8 ranks)."]


def test_a_total_beyond_the_machine_is_refused(tmp_path, lines):
    """What the machine doesn't have is refused, with the setting and the largest value that would do."""
    root = make_machine(tmp_path, memory=64 * GIB)
    check_memory(8 * GIB, 8, what="L1", root=root)
    with pytest.raises(ConfigError) as caught:
        check_memory(8 * GIB + 1, 8, what="L1", root=root)
    problem = str(caught.value)
    assert "L1: 8.00 GiB per rank, 64.00 GiB in total on this machine (8 ranks) is more than the 64.00 GiB" in problem
    assert problem.endswith("set l1_size_per_rank to 8192MiB at most.")


def test_the_largest_value_is_accepted(tmp_path, lines):
    """The value that the error names is one that works."""
    root = make_machine(tmp_path, memory=10 * GIB + 12345 * 1024)
    with pytest.raises(ConfigError, match="to 3417MiB at most"):
        check_memory(8 * GIB, 3, what="L1", setting="l1_size_per_rank", root=root)
    check_memory(3417 << 20, 3, what="L1", root=root)


def test_an_unknown_machine_is_not_checked(tmp_path, lines):
    """Where the memory isn't known, that is logged instead of guessed at."""
    check_memory(8 * GIB, 1, what="L1", root=make_machine(tmp_path))
    (line,) = lines
    assert line.endswith("in total on this machine (1 rank); not checked, since the machine's memory isn't known.")


@pytest.mark.parametrize(
    ("local_world_size", "data_parallel_size_local", "expected"),
    [(1, 1, 1), (8, 1, 8), (2, 4, 8), (4, 0, 4)],
)
def test_ranks_on_host(local_world_size, data_parallel_size_local, expected):
    """Ranks of this machine are counted over its data-parallel replicas; none here means that others start them."""
    config = SimpleNamespace(
        local_world_size=local_world_size,
        data_parallel_size_local=data_parallel_size_local,
        distributed_executor_backend="mp",
    )
    assert ranks_on_host(config) == expected


def test_ray_ranks_are_at_most_the_devices(monkeypatch):
    """Ray may have put ranks on other machines: here are no more than there are devices."""
    config = SimpleNamespace(local_world_size=16, data_parallel_size_local=1, distributed_executor_backend="ray")
    monkeypatch.setattr(memory_budget, "_devices", lambda: 8)
    assert ranks_on_host(config) == 8
    monkeypatch.setattr(memory_budget, "_devices", lambda: None)
    assert ranks_on_host(config) == 16


def test_vllms_own_parallel_configuration():
    """The fields are those of vLLM's own class."""
    from vllm.config import ParallelConfig

    config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp")
    assert ranks_on_host(config) == 2
