"""`kvplug-hooks matrix`, and the data that it prints."""

from __future__ import annotations

import json
from datetime import date

import pytest
from click.testing import CliRunner

from kvplug_hooks import matrix
from kvplug_hooks.cli import main
from kvplug_hooks.matrix import Matrix, Row

KEYS = ["release", "runner", "anchor_count", "added_lines", "contract", "runs", "supported"]
GOOD = Row("0.19.0", "v1", 1, 2, contract=True, runs=True)
BAD = Row("0.34.0", "v2", 1, 2, contract=True, runs=False, reason="execute_model ends without a state update.")


def output(*arguments):
    result = CliRunner().invoke(main, ["matrix", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_list_for_programs():
    """One object for each release and runner, each release once per runner."""
    rows = json.loads(output("--json"))
    assert {tuple(row) for row in rows if row["supported"]} == {tuple(KEYS)}
    pairs = [(row["release"], row["runner"]) for row in rows]
    assert len(set(pairs)) == len(pairs) == 42
    assert rows == [row.as_json() for row in matrix.recorded().rows]


def test_the_table_for_people():
    """The same as a table, with the day of the results."""
    lines = output().splitlines()
    assert lines[0].split() == ["vLLM", "Runner", "Anchors", "Added", "lines", "Contract", "Runs", "Supported"]
    assert lines[1].split() == ["0.14.0", "v1", "1", "2", "yes", "yes", "yes"]
    assert lines[-1] == f"42 of 42 supported, as of {matrix.recorded().day}."


def test_what_is_not_supported_has_its_reason(monkeypatch):
    """In both forms."""
    monkeypatch.setattr("kvplug_hooks.cli.matrix.recorded", lambda: Matrix(date(2026, 1, 2), (GOOD, BAD)))
    assert json.loads(output("--json"))[1] == {
        **dict(zip(KEYS, ["0.34.0", "v2", 1, 2, True, False, False], strict=True)),
        "reason": BAD.reason,
    }
    assert output().splitlines()[-2:] == ["1 of 2 supported, as of 2026-01-02.", f"0.34.0 v2: {BAD.reason}"]


@pytest.mark.parametrize("change", [{"anchor_count": 0}, {"anchor_count": 2}, {"contract": False}, {"runs": False}])
def test_all_three_must_hold(change):
    """One anchor, the contract, and a run."""
    values = {"anchor_count": 1, "added_lines": 2, "contract": True, "runs": True, **change}
    assert GOOD.supported
    assert not Row("0.19.0", "v1", **values).supported


def test_what_is_written_is_read(monkeypatch, tmp_path):
    """The data file holds what it was given, reasons included."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / matrix.FILE_NAME).write_text(matrix.dump(date(2026, 1, 2), [GOOD, BAD]))
    monkeypatch.setattr(matrix, "files", lambda package: tmp_path)
    assert matrix.recorded() == Matrix(date(2026, 1, 2), (GOOD, BAD))
