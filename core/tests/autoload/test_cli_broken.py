"""The commands in an environment that pydantic, and so vLLM, can't be imported in."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_undecodable_metadata_is_listed_not_raised(tmp_path):
    """One distribution whose entry points aren't text is a row with its reason: the command is there to say so."""
    folder = tmp_path / "bad-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_bytes(b"\xff\xfe")
    run = subprocess.run(
        [sys.executable, "-m", "kvplug.cli", "list", "--no-load", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert any(row["distribution"] == "bad" for row in json.loads(run.stdout)["skipped"])
