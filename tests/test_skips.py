"""Where CI=true, a test that skips fails, unless it is marked as one that may."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.env_script import ROOT

TESTS = """
import pytest

def test_runs(): pass

def test_skips(): pytest.skip("no such thing here")

@pytest.mark.skipif(True, reason="not on this machine")
def test_is_skipped(): pass

@pytest.mark.may_skip_in_ci("needs a GPU")
def test_may_skip(): pytest.skip("no GPU")

@pytest.mark.xfail(reason="known")
def test_fails_as_expected(): assert False
"""

MODULE = """
import pytest
pytest.importorskip("no_such_module")
def test_never(): pass
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Return a function that runs pytest with the plugin on one file, and returns its output."""

    def run(content, ci):
        file = tmp_path / "test_it.py"
        file.write_text(content)
        environment = {name: value for name, value in os.environ.items() if name != "CI"} | ci
        command = [sys.executable, "-m", "pytest", "-p", "support.skips", "-p", "no:cacheprovider", "-ra", file]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT / "tests"), "COLUMNS": "300"},
            capture_output=True,
            text=True,
            check=False,
        ).stdout

    return run


def test_on_ci_a_skip_fails_with_its_reason(run_pytest):
    """Skips in a test and by a marker fail, with the reason; allowed skips and expected failures stay what they are."""
    output = run_pytest(TESTS, {"CI": "true"})
    # pytest counts what goes wrong before a test's own code as an error
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed" in output
    assert "1 error" in output
    assert "no such thing here" in output
    assert "not on this machine" in output


def test_on_ci_a_skipped_module_is_an_error(run_pytest):
    """A module that skips itself, as for a library that is missing, fails the run."""
    output = run_pytest(MODULE, {"CI": "true"})
    assert "could not import 'no_such_module'" in output
    assert "1 error" in output


@pytest.mark.parametrize("ci", [{}, {"CI": "false"}])
def test_elsewhere_a_skip_is_a_skip(run_pytest, ci):
    """On a contributor's machine nothing changes."""
    assert "1 passed, 3 skipped, 1 xfailed" in run_pytest(TESTS, ci)
    assert "1 skipped" in run_pytest(MODULE, ci)
