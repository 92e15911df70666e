"""`make bench-type1`: that it still measures, and what it prints. How fast anything is isn't tested."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: The keys that the JSON line promises.
KEYS = {
    "all_miss_cpu_overhead",
    "warm_over_limit",
    "warm_speedup",
    "load_vs_example",
    "copy_vs_memcpy",
    "dispatch_us_idle",
    "dispatch_us_64",
    "keys_128k_ms",
    "slab_overhead",
}


@pytest.fixture
def bench(monkeypatch):
    """Return a function that imports a module of the benchmark."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name, part="type1": importlib.import_module(f"benchmarks.{part}.{name}")


def values(figures):
    assert all(math.isfinite(figure.value) and figure.value > 0 for figure in figures)
    return {figure.name for figure in figures}


def test_keys_are_measured(bench):
    """Keys of a long prompt are measured, once and for one block more."""
    assert values(bench("keys").measure(1)) == {"keys_128k_ms", "keys_next_block_us"}


def test_dispatch_is_measured(bench, monkeypatch):
    """The patched line is measured with each connector; each step is shortened, or not, as the case says."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    from kvplug import compat, dispatch

    # What the measurement sets is put back.
    monkeypatch.setattr(compat, "tensor_parallel_ranks", compat.tensor_parallel_ranks)
    monkeypatch.setattr(dispatch, "_current", None)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    assert values(bench("dispatching").measure(1)) == {
        "dispatch_us_none",
        "dispatch_us_unhooked",
        "dispatch_us_idle",
        "dispatch_us_64",
        "dispatch_us_64_reading",
    }


def test_memory_is_measured(bench):
    """The tier's memory is measured in processes of their own, and is at least that of the blocks."""
    (figure,) = bench("slab").measure()
    assert figure.name == "slab_overhead"
    assert 1 <= figure.value < 2


def test_copies_are_measured(bench, monkeypatch):
    """Copies are measured both ways, in both layouts, and compared with memcpy of the same bytes."""
    copies = bench("copies")
    monkeypatch.setattr(copies, "_PASS", 24 << 20)
    monkeypatch.setattr(copies, "_PIECES", (32 << 10, 64 << 10))
    figures = copies.measure(1)
    assert values(figures) == {"copy_vs_memcpy", "copy_vs_memcpy_numpy", "memcpy_gb_per_s"}
    assert "lowest of 8 cases" in figures[0].detail


def test_the_memory_tier_is_measured(bench, monkeypatch):
    """Copies are compared with memcpy both ways, and bookkeeping is measured in a full tier that evicts."""
    l1 = bench("l1", "store")
    monkeypatch.setattr(l1, "_PASS", 8 << 20)
    ratios = l1._copies(1 << 20, 1)
    assert set(ratios) == {"put", "get"}
    assert all(ratio > 0 for ratio, _ in ratios.values())
    lookup, evict, _ = l1._bookkeeping("s3fifo", 1000)
    assert lookup > 0
    assert evict > 0


def test_vllms_tier_is_measured(bench):
    """Lookup and eviction are measured in both managers, on the same keys, and find and store what they should."""
    ours, theirs = bench("vllm_tiers", "store")._measure("s3fifo", "arc", 300, 2)
    assert len(ours) == len(theirs) == 2
    assert min(ours + theirs) > 0


def test_a_childs_failure_is_the_measurements(bench):
    """A function runs in another process, and if it raises there, the traceback comes back."""
    processes = bench("processes", "common")
    assert processes.in_child(os.getpid) != os.getpid()
    with pytest.raises(processes.ChildError, match="FileNotFoundError"):
        processes.in_child(os.listdir, "/nonexistent")
    with pytest.raises(processes.ChildError, match="the process ended"):
        processes.in_child(os._exit, 0)


def test_the_last_line_is_json(bench, monkeypatch, capsys):
    """The table shows values, limits and what was missed; the line after it has all figures; so has the exit code."""
    main, figure = bench("__main__"), bench("figures", "common").Figure
    good = figure("good", 1.23456, "ms", at_most=2, detail="one run")
    bad = figure("bad", 0.5, at_least=5)
    monkeypatch.setattr(main, "set_environment", lambda: None)
    monkeypatch.setattr(main, "_MEASUREMENTS", {"one": lambda quick: [good], "other": lambda quick: [bad]})
    monkeypatch.setattr("sys.argv", ["bench", "--only", "one"])
    assert main.main() == 0
    monkeypatch.setattr("sys.argv", ["bench"])
    assert main.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[1]) == {"good": 1.235}
    assert json.loads(lines[-1]) == {"good": 1.235, "bad": 0.5}
    assert lines[2].split() == ["good", "1.235", "ms", "<=", "2", "one", "run"]
    assert lines[3].split() == ["bad", "0.5", ">=", "5", "MISSED"]


def test_a_figure_that_is_no_number_misses_its_limit(bench):
    """NaN is within no limit."""
    figure = bench("figures", "common").Figure
    assert not figure("a", math.nan, at_most=1).met
    assert not figure("a", math.nan, at_least=1).met


def test_every_promised_key_is_measured_somewhere():
    """The names of the figures, those of the engines' measurements included, are in the benchmark's source."""
    names = set()
    for file in (ROOT / "benchmarks" / "type1").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                names.add(node.args[0].value)
    assert names >= KEYS


def test_the_page_has_every_figure():
    """docs/benchmarks.md shows a run of all of it."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    last = [line for line in page.splitlines() if line.startswith("{")][-1]
    assert set(json.loads(last)) >= KEYS
