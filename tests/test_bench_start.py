"""`make bench-start`: what it prints, and that a worker's start doesn't take much longer with kvplug."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from support.engines import base_environment

ROOT = Path(__file__).resolve().parents[1]
KEYS = ["start_v1_cpu_s", "start_v1_wall_s", "start_v2_cpu_s", "start_v2_wall_s", "start_replace_cpu_s"]


@pytest.fixture
def bench(monkeypatch):
    """The benchmark's main module."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.start.__main__")


def test_the_figures(bench):
    """CPU seconds are compared run by run, seconds on the wall by the best of all runs."""
    runs = {"plain": [[1.0, 0.5], [0.7, 0.6], [0.9, 0.5]], "hooked": [[1.5, 0.6], [0.8, 0.8], [2.0, 0.9]]}
    found = {f"{runner} {kind}": each for runner in ("v1", "v2") for kind, each in runs.items()}
    figures = bench.figures(found | {"replaced": [[9.0, 0.1], [9.0, 0.4], [9.0, 0.5]]})
    assert [figure.name for figure in figures] == KEYS
    assert [figure.rounded for figure in figures] == pytest.approx([0.2, 0.1, 0.2, 0.1, 0.4])
    assert [figure.met for figure in figures] == [True, True, True, True, False]


def test_the_page_has_them():
    """docs/hooks.md shows a run."""
    page = (ROOT / "docs" / "hooks.md").read_text()
    assert set(KEYS) == set(re.findall(r"^\| `(start_\w+)` \|", page, re.MULTILINE))
    assert set(KEYS) in [set(json.loads(line)) for line in page.splitlines() if line.startswith("{")]


@pytest.mark.engine
def test_a_start_takes_at_most_a_third_of_a_second_more(bench, monkeypatch):
    """Of CPU time, which doesn't depend on what else the machine does."""
    for name, value in base_environment("v1").items():
        monkeypatch.setenv(name, value)
    cpu = {figure.name: figure for figure in bench.measured(3) if figure.name.endswith("_cpu_s")}
    assert len(cpu) == 3
    assert all(figure.met for figure in cpu.values()), cpu
