"""What CI runs, and what the make targets run in which order. Nothing of it is really run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from support.env_script import ROOT

#: Stands for make: notes its target, and what `timeout` or an interrupt would leave as its exit status.
MAKE = """#!/bin/sh
echo "$1" >>made
echo "output of $1"
case " $FAILING " in *" $1="*) exit "${FAILING#*=}" ;; esac
"""


@pytest.fixture
def ci(tmp_path):
    """Return a function that runs CI's script with the targets that fail, and returns status, targets and output."""
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    shutil.copy(ROOT / ".ci" / "run", script)
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)

    def run(failing=""):
        (tmp_path / "made").unlink(missing_ok=True)
        environment = os.environ | {"PATH": f"{make.parent}:{os.environ['PATH']}", "FAILING": failing}
        done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False, cwd="/")
        return done.returncode, (tmp_path / "made").read_text().split(), done.stdout

    return run


def test_ci_runs_everything(ci):
    """CI runs the whole suite, then the old vLLM's environment and tests."""
    status, targets, _ = ci()
    assert targets == ["test", "env-0.19", "test-0.19"]
    assert status == 0


@pytest.mark.parametrize("target", ["test", "test-0.19"])
def test_a_failing_test_fails_ci(ci, target):
    """Whichever tests fail, CI fails, at once."""
    status, targets, _ = ci(f"{target}=2")
    assert targets[-1] == target
    assert status == 2


@pytest.mark.parametrize(("code", "reason"), [(2, "for the reason above"), (124, "longer than 15 minutes")])
def test_ci_goes_on_without_the_old_engine(ci, code, reason):
    """Where the old vLLM can't be installed, in time, CI says so, and that's no failure."""
    status, targets, output = ci(f"env-0.19={code}")
    assert targets == ["test", "env-0.19"]
    assert status == 0
    assert output.splitlines()[-1].startswith("vLLM 0.19.1 was not tested")
    assert output.splitlines()[-1].endswith(reason)
    assert "output of env-0.19" in output


def _plan(target):
    # Below another make, as in `make test`, this one would take over its ARGS, and say which folder it enters.
    inherited = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    command = ["make", "-n", target]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["test", "check"])
def test_lint_and_types_come_before_the_tests(target):
    """``make test`` and ``make check`` set the environment up, then lint, check types, and run pytest last."""
    plan = _plan(target)
    steps = ["setup_env.py", "ruff check", "ruff format --check", "-m mypy", "-m pytest"]
    assert [plan.index(step) for step in steps] == sorted(plan.index(step) for step in steps)
    assert plan.count("-m pytest") == 1


def test_the_old_engine_has_tests_of_its_own():
    """``make test-0.19`` sets its own environment up and runs only its own tests, which nothing else collects."""
    plan = _plan("test-0.19")
    assert plan.splitlines()[-1].split() == [".venv-0.19/bin/python", "-m", "pytest", "tests/v019"]
    assert "setup_env.py --vllm 0.19.1" in plan
    collect = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_ci.py", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "tests/test_ci.py::" in collect.stdout
    assert "v019" not in collect.stdout
