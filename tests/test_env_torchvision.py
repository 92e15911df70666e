"""``make env`` keeps a torchvision beside the environment: with a pip that acts it out."""

from __future__ import annotations

from pathlib import Path

import pytest
from envlib.current import CurrentEnvironment
from envlib.environment import Options
from envlib.torchvision import FOLDER, VERSION, is_there, provide_torchvision
from envlib.workspace import SetupError, Workspace


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Return a clone's environment whose pip installs a torchvision like PyPI's; `calls` has its arguments."""
    calls = []

    def install(self, what, *arguments):
        calls.append(arguments)
        package = Path(arguments[arguments.index("--target") + 1]) / "torchvision"
        package.mkdir(parents=True)
        package.with_name(f"torchvision-{VERSION}+cpu.dist-info").mkdir()
        for name in ("__init__.py", "_meta_registrations.py", "_autograd_registrations.py"):
            (package / name).write_text("raise ImportError\n")
        if "unreachable" in arguments:
            raise SetupError("no network")

    monkeypatch.setattr(CurrentEnvironment, "install", install)
    monkeypatch.setattr(CurrentEnvironment, "calls", calls, raising=False)
    (tmp_path / "build").mkdir()
    return CurrentEnvironment(Workspace(tmp_path, (), (), ""), Options(find_links="wheels"))


def test_it_is_installed_once(environment, tmp_path):
    """Without what it needs, from where torch comes from, too, and without what fails beside a CPU torch."""
    provide_torchvision(environment)
    package = tmp_path / FOLDER / "torchvision"
    assert is_there(tmp_path / FOLDER)
    assert {file.name for file in package.iterdir() if not file.read_text()} == {
        "_meta_registrations.py",
        "_autograd_registrations.py",
    }
    (arguments,) = environment.calls
    assert {"--no-deps", f"torchvision=={VERSION}", "wheels"} <= set(arguments)
    provide_torchvision(environment)
    assert len(environment.calls) == 1


def test_another_version_is_replaced(environment, tmp_path):
    """Where torch has become another one."""
    (tmp_path / FOLDER / "torchvision-0.1.0.dist-info").mkdir(parents=True)
    provide_torchvision(environment)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [
        "torchvision",
        f"torchvision-{VERSION}+cpu.dist-info",
    ]


def test_a_failure_is_said_and_leaves_nothing(environment, tmp_path, capsys):
    """The environment is right without it: only tests of Qwen3.5 skip."""
    environment.options = Options(find_links="unreachable")
    provide_torchvision(environment)
    assert "Qwen3.5 can't be tested: no network" in capsys.readouterr().out
    assert not any((tmp_path / "build").iterdir())
