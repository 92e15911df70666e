"""A virtual environment in the clone: made in two stages, and left alone where it is right already."""

from __future__ import annotations

import abc
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envlib.workspace import SCRIPT_VERSION, SetupError, Workspace, digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Seconds between two signs of life.
HEARTBEAT = 10.0

#: Run by the environment's own interpreter: what is really installed there, as JSON.
PROBE = """
import importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def origin(name):
    spec = importlib.util.find_spec(name)
    return spec and spec.origin
names, modules = json.loads(sys.argv[1])
print(json.dumps([{name: version(name) for name in names}, {name: origin(name) for name in modules}]))
"""


@dataclass(frozen=True)
class Options:
    """Where to find torch, beyond where pip looks by itself."""

    torch_index: str | None = None
    find_links: str | None = None

    def pip_arguments(self) -> list[str]:
        """Return them as options of pip."""
        arguments = [] if self.torch_index is None else ["--extra-index-url", self.torch_index]
        return arguments + ([] if self.find_links is None else ["--find-links", self.find_links])


class Environment(abc.ABC):
    """An environment in a workspace's root: what state it is in, and how it gets right.

    The first stage is the engine, vLLM and what it needs; the second one the members of the workspace, editable, and
    tools. Where the second one is out of date only that is done again.
    """

    #: The folder's name.
    name: str
    #: vLLM, as pip takes it.
    vllm: str
    #: Python versions that `vllm` has wheels for: from the first one on, below the second one.
    pythons: tuple[tuple[int, int], tuple[int, int]]

    def __init__(self, workspace: Workspace, options: Options) -> None:
        self.workspace = workspace
        self.options = options
        self.folder = workspace.root / self.name
        self.python = self.folder / "bin" / "python"
        self.log = workspace.root / "build" / f"setup_env{self.name.removeprefix('.venv')}.log"
        self._stamp = self.folder / "kvplug-env.json"
        # The folder's own path is in its scripts, so an environment that was moved or copied is not right.
        self._wanted = {
            "engine": digest([SCRIPT_VERSION, sys.version, str(self.folder), *self.engine_facts()]),
            "workspace": workspace.fingerprint,
        }

    @abc.abstractmethod
    def engine_facts(self) -> list[Any]:
        """Return what the first stage is made of: it is done again where that changes."""

    @abc.abstractmethod
    def engine_versions(self) -> dict[str, str | None]:
        """Return the version that each distribution must have after the first stage, None for: not installed."""

    @abc.abstractmethod
    def install_engine(self) -> None:
        """Do the first stage, in an environment that has only pip."""

    @abc.abstractmethod
    def tools(self) -> Sequence[str]:
        """Return the requirements that the second stage installs beside the members."""

    @abc.abstractmethod
    def install_workspace(self) -> None:
        """Do the second stage."""

    def ensure(self) -> None:
        """Make the environment right; do nothing where it is.

        Raises:
            SetupError: it can't be made.
        """
        problem = self._problem("engine")
        if problem:
            say(f"making {self.name}: {problem}")
            self._create()
            self.install_engine()
            self._write_stamp("engine")
        problem = self._problem("workspace")
        if problem:
            say(f"installing the workspace: {problem}")
            self._write_stamp("engine")  # an interrupt from here on leaves this stage to be done again
            self.install_workspace()
            self._write_stamp("engine", "workspace")
        problem = self._problem("engine") or self._problem("workspace")
        if problem:
            raise SetupError(f"the environment was made, but {problem}; pip's output is in {self.log}")

    def _problem(self, stage: str) -> str | None:
        """Return what is wrong with a stage, or None where it is complete, up to date and really there."""
        if not self.python.exists():
            return "there is none"
        try:
            stamp = json.loads(self._stamp.read_text())
        except (OSError, ValueError):
            stamp = {}
        if stage not in stamp:
            return "it is not complete"
        if stamp[stage] != self._wanted[stage]:
            return "it was made from other versions, by another Python or in another folder"
        return self._installed_wrong(stage)

    def _installed_wrong(self, stage: str) -> str | None:
        wanted = self.engine_versions()
        packages = self.workspace.packages()
        tools = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in self.tools()]
        question = json.dumps([[*wanted, *tools], ["torch", "vllm", *packages]])
        probe = subprocess.run(
            [self.python, "-I", "-c", PROBE, question], capture_output=True, text=True, check=False, env=_clean_env()
        )
        if probe.returncode != 0:
            return f"its Python does not run: {probe.stderr.strip() or probe.returncode}"
        versions, origins = json.loads(probe.stdout)
        if stage == "engine":
            wrong = {name: versions[name] for name in wanted if not _is_version(versions[name], wanted[name])}
            missing = [name for name in ("torch", "vllm") if not origins[name]]
        else:
            wrong = {name: origins[name] for name, file in packages.items() if origins[name] != str(file)}
            missing = [name for name in tools if versions[name] is None]
        if wrong or missing:
            found = [f"{name} is {value or 'not installed'}" for name, value in wrong.items()]
            return ", ".join(found + [f"{name} is missing" for name in missing])
        return None

    def _create(self) -> None:
        self._remove()
        self.log.parent.mkdir(exist_ok=True)
        self.log.write_text("")
        self.run(
            f"creating {self.name} with Python {platform.python_version()}",
            [sys.executable, "-m", "venv", str(self.folder)],
            "Does this Python have venv and ensurepip? On Debian and Ubuntu they are in the package python3-venv.",
        )

    def _remove(self) -> None:
        if self.folder.is_symlink():
            self.folder.unlink()
        elif self.folder.exists():
            self._stamp.unlink(missing_ok=True)  # first: a half-removed environment is not complete
            shutil.rmtree(self.folder)

    def _write_stamp(self, *stages: str) -> None:
        unfinished = self._stamp.with_suffix(".part")
        unfinished.write_text(json.dumps({stage: self._wanted[stage] for stage in stages}, indent=1))
        unfinished.replace(self._stamp)

    def members(self) -> list[str]:
        """Return pip's arguments that install the workspace's members, editable."""
        return [argument for member in self.workspace.members for argument in ("--editable", f"./{member}")]

    def install(self, what: str, *arguments: str) -> None:
        """Run ``pip install``."""
        # Without bytecode: compiling all of torch takes longer than what is ever imported of it.
        self.pip(f"installing {what}", "install", "--no-compile", "--progress-bar", "off", *arguments)

    def pip(self, what: str, command: str, *arguments: str) -> None:
        """Run the environment's pip."""
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", command]
        self.run(what, [*pip, *arguments])

    def run(self, what: str, command: Sequence[str], remedy: str = "") -> None:
        """Run a command with its output going to the log, and show signs of life.

        Raises:
            SetupError: it failed; the message has the end of its output.
        """
        started = time.monotonic()
        say(f"{what} ...")
        with self.log.open("ab") as output:
            output.write(f"\n$ {' '.join(command)}\n".encode())
            output.flush()
            begin = output.tell()
            process = subprocess.Popen(
                command,
                cwd=self.workspace.root,
                env=_clean_env(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                while not _ended(process, HEARTBEAT):
                    lines = self._output(begin)
                    say(f"  {time.monotonic() - started:4.0f} s  {lines[-1].strip()[:90] if lines else ''}")
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if process.returncode != 0:
            tail = "\n".join(self._output(begin)[-15:])
            raise SetupError(f"{what} failed: {tail}\n{remedy or f'All of the output is in {self.log}.'}")
        say(f"  done in {time.monotonic() - started:.0f} s")

    def _output(self, begin: int) -> list[str]:
        """Return the log's lines from an offset on, less those that only say where pip found nothing."""
        text = self.log.read_bytes()[begin:].decode(errors="replace")
        return [line for line in text.splitlines() if line.strip() and "is ignored: it is neither a file" not in line]


def say(line: str) -> None:
    """Print at once, also where the output is not a terminal."""
    print(line, flush=True)


def _is_version(found: str | None, wanted: str | None) -> bool:
    """Compare versions; a wanted one that names no build (``+cpu``) is met by any."""
    if found is not None and wanted is not None and "+" not in wanted:
        found = found.partition("+")[0]
    return found == wanted


def _clean_env() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None
