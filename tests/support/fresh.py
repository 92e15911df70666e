"""Wheels of the workspace, and an environment that has only what is installed in it from them, and vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.env_script import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")


def build_wheels(projects: Sequence[Path], folder: Path) -> list[Path]:
    """Build a wheel of each project, as ``pip install`` does it: in an environment with just the build system.

    Args:
        projects: Folders with a ``pyproject.toml``.
        folder: Where the wheels go.

    Raises:
        AssertionError: a build failed; the message has pip's output.
    """
    _check([sys.executable, *_PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), *map(str, projects)])
    return sorted(folder.glob("*.whl"))


@dataclass(frozen=True)
class FreshEnvironment:
    """A virtual environment; see `make`.

    Attributes:
        folder: The environment's root.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> FreshEnvironment:
        """Make an environment that has vLLM, torch and what they need, and nothing of this workspace.

        A second installation of those would take minutes and 3.5 GB. So the environment gets links to what the tests'
        own environment has, except for our distributions and all ``.pth`` files: editable installs work through them.
        """
        _check([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        engine = folder / "engine"
        engine.mkdir()
        for entry in _site_packages().iterdir():
            ours = entry.name.startswith(("kvplug", "_editable_impl_", "__editable__"))
            if not (ours or entry.suffix == ".pth" or entry.name == "__pycache__"):
                (engine / entry.name).symlink_to(entry)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "engine.pth").write_text(f"{engine}\n")
        return cls(folder)

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(self.folder / "bin" / "python")

    def install(self, requirement: str, wheels: Path) -> None:
        """Install a distribution and what it needs from a folder of wheels; no index is asked for anything.

        Raises:
            AssertionError: something is neither among the wheels nor installed; the message has pip's output.
        """
        pip = [sys.executable, *_PIP, "--python", self.python, "install", "--no-index"]
        _check([*pip, "--find-links", str(wheels), requirement])

    def own_vllm(self) -> Path:
        """Give the environment a vLLM whose folders are its own and whose files are links, as uv's link mode does it.

        Returns:
            The folder that contains the package.
        """
        engine = self.folder / "engine"
        for link in (engine / "vllm", *engine.glob("vllm*.dist-info")):
            source = link.resolve()
            link.unlink()
            shutil.copytree(source, link, symlinks=True, copy_function=os.symlink)
        return engine

    def ask(self, code: str, *arguments: str) -> Any:
        """Run code in a new process of the environment, and return the JSON that it prints."""
        return json.loads(_check([self.python, "-I", "-c", code, *arguments]))

    def command(self, name: str, *arguments: str) -> str:
        """Run one of the environment's commands, and return what it prints."""
        return _check([str(self.folder / "bin" / name), *arguments])


def _site_packages() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the tests' own environment has no vLLM")
    return Path(spec.origin).parents[1]


def _check(command: Sequence[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
