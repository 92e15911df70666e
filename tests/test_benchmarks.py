"""The benchmarks of type1, type2 and pd_reuse: that they still measure, and what is printed. No speed is tested."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
from pathlib import Path

import pytest

from support.engines import run

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

TYPE2_KEYS = {
    "all_miss_cpu_overhead",
    "itl_rise_while_loading",
    "itl_rise_slow_store",
    "throughput_vs_none",
    "throughput_vs_type1",
    "throughput_vs_example",
    "scheduler_us_256x32k",
    "ttft_layerwise_vs_between_steps",
}

PD_KEYS = {
    "recomputed_tokens_full_hit",
    "handover_bytes_vs_store",
    "ttft_handover_vs_recompute_1k",
    "ttft_handover_vs_recompute_4k",
    "ttft_handover_vs_recompute_8k",
    "ttft_overhead_0pct",
    "ttft_vs_one_engine_60pct",
    "ttft_vs_one_engine_90pct",
    "itl_rise_split",
    "itl_rise_one_engine",
    "itl_rise_split_vs_one",
}
#: How those of them begin that are made of parts.
MADE = ("handover_bytes_vs_store", "ttft_handover_vs_recompute_", "ttft_vs_one_engine_", "itl_rise_")


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
    main, command, figure = bench("__main__"), bench("command", "common"), bench("figures", "common").Figure
    good = figure("good", 1.23456, "ms", at_most=2, detail="one run")
    bad = figure("bad", 0.5, at_least=5)
    monkeypatch.setattr(command, "set_environment", lambda: None)
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


def test_the_scheduler_half_is_measured(bench):
    """Steps are measured with nobody, the first and all of those that wait being asked, and a prompt's first lookup."""
    figures = bench("scheduling", "type2").measure(4, 4, 4096)
    assert values(figures) == {
        "scheduler_us_256x32k",
        "scheduler_us_256x32k_over_4k",
        "scheduler_us_256x32k_none_asked",
        "scheduler_us_256x32k_all_asked",
        "scheduler_us_32k_first_asked",
    }


def test_latency_figures_compare_like_with_like(bench):
    """A rise is over the same requests in vLLM's own cache; the limit is on that; others are shown."""
    rounds = {"alone": 0.010, "local": 0.020, "loading": 0.022}
    results = {case: [{"seconds": [value] * 9 + [2 * value]}] * 3 for case, value in rounds.items()}
    figures = bench("latency", "type2")._figures("rise", results, 0.05, "a test")
    assert [figure.name for figure in figures] == ["rise", "rise_p99", "rise_vs_alone"]
    assert [figure.value for figure in figures] == pytest.approx([0.1, 0.1, 1.2])
    assert [figure.met for figure in figures] == [False, True, True]


def test_throughput_is_compared_round_by_round(bench):
    """The ratio is the median of the rounds', each of which measures both sides."""
    figure = bench("throughput", "type2")._figure("gain", [8.0, 8.0, 9.0], [1.0, 2.0, 3.0], 3, "a test")
    assert figure.value == 4
    assert figure.met
    assert "3 to 8" in figure.detail


@pytest.mark.engine
def test_latency_is_measured(bench):
    """One request decodes while others load: each of them is loaded, and each finishes."""
    result = run(measure_latency, timeout=120)
    assert len(result["seconds"]) == 12
    assert result["others"] == 16
    assert result["loaded"] >= 15 * 64  # vLLM's own cache may have one


def measure_latency():
    import sys

    sys.path.insert(0, str(ROOT))
    from benchmarks.type2 import engine

    engine.start(engine.type2("64MiB"), 24)
    prompts = ("more than vLLM's cache holds", 16, 64, 1)
    engine.serve(prompts, 1)
    return engine.latencies(prompts, 12, 1, 4)


def test_a_hand_over_is_timed_from_the_end_of_the_prefill_to_the_last_copy(bench):
    """What the engines' connectors did is put on one clock, which starts where the prefill's step ends."""
    handover = bench("handover", "pd")
    prefill = [
        ("request", 1.0, 1.1),
        ("end", 5.0, 5.01),
        ("gather", 5.02, 5.05),
        ("put", 5.03, 5.2),
        ("put", 5.04, 5.3),
    ]
    prefill.append(("answer", 1.1, 5.1))
    decode = [("request", 5.15, 5.16), ("exists", 5.2, 5.21), ("get", 5.22, 5.4), ("scatter", 5.4, 5.5)]
    decode.append(("answer", 5.16, 5.6))
    run = handover._Run(prefill, decode, 1)
    assert run.seconds == pytest.approx(0.5)
    assert run.steps["last put"] == pytest.approx(0.3)
    assert run.steps["first token"] == pytest.approx(0.6)
    ratio, millis = handover._figures("8k", 8010, 10**9, [(run, (0.3, 0.1))])
    assert (ratio.name, millis.name) == ("handover_bytes_vs_store", "handover_ms_8k")
    assert ratio.value == pytest.approx(0.4 / 0.5)
    assert millis.value == pytest.approx(500)


def test_the_store_alone_is_measured(bench, tmp_path):
    """Values are written in one process and found and read in another one."""
    processes, engine, servers = bench("processes", "common"), bench("engine", "pd"), bench("servers", "pd")
    connector = servers.connector(tmp_path / "store", disk_size="1GiB")
    with processes.Child("test-put") as put, processes.Child("test-get") as get:
        for child, core in zip((put, get), servers.CORES, strict=True):
            child.call(engine.use_store, connector, core, servers.LITTLE)
        assert put.call(engine.store_put, "a", 9, 16) > 0
        assert get.call(engine.store_get, "a", 9, 16) > 0
        with pytest.raises(processes.ChildError, match="doesn't find"):
            get.call(engine.store_get, "b", 9, 16)


def test_the_time_between_tokens_is_that_of_each_request(bench, tmp_path):
    """Tokens count where they come: before the prompt, or until its first token; both are drawn."""
    watched = bench("itl", "pd").Watched([[-3, -1, -0.5, 0.5, 2, 5], [-1.5, 1.0]], 2.5)
    assert sorted(watched.before) == [0.5, 2]
    assert sorted(watched.during) == [1, 1.5, 2.5]
    bench("plot", "pd").draw(watched, watched, tmp_path / "plot.png", 4096)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_every_promised_key_is_measured_somewhere():
    """The names of the figures, those of the engines' measurements included, are in the benchmark's source."""
    for folders, keys in (("type[12]", KEYS | TYPE2_KEYS), ("pd", PD_KEYS)):
        names = set()
        for file in (ROOT / "benchmarks").glob(f"{folders}/*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant):
                    names.add(node.value)
        # Some have the length of the prompt, the share that is stored, or the case in their name.
        made = {key for key in keys if any(key.startswith(name) for name in MADE)}
        assert names >= keys - made


def test_the_page_has_every_figure():
    """docs/benchmarks.md shows a run of all of it, and the other pages one of the other benchmarks."""
    for name, keys in (("benchmarks", KEYS), ("benchmarks-type2", TYPE2_KEYS), ("benchmarks-pd", PD_KEYS)):
        page = (ROOT / "docs" / f"{name}.md").read_text()
        last = [line for line in page.splitlines() if line.startswith("{")][-1]
        assert set(json.loads(last)) >= keys
