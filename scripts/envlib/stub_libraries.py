"""Makes stand-ins for the CUDA libraries of a CUDA build of torch, so that it can be imported without them.

For tests only. vLLM's CPU build of 0.19.1 needs a torch that PyPI has for CUDA only, and the libraries behind that are
2.5 GB that a CPU engine never calls. The stand-ins have the functions that torch's own libraries name, and each of them
does nothing but return an error. So torch says that there is no CUDA device, which is right.

It needs a C compiler, and ``readelf`` and ``nm`` (binutils).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    #: A version of a library's symbols, and the functions that have it. Functions without one have the version "".
    Versions = dict[str, set[str]]

#: What ``import torch`` loads. Libraries that torch opens later, for CUDA, stay without theirs.
ROOTS = ("libtorch_global_deps.so", "libtorch_python.so")

#: cudaErrorNoDevice; not 0, which is success, in any of the libraries.
ERROR = 100

#: Written beside the libraries, so that nobody takes them for real.
NOTE = "kvplug-stub-libraries.txt"

_NVIDIA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
_NVIDIA_FUNCTION = re.compile(r"(cu|nv|nccl)", re.IGNORECASE)
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_VERSION_FILE = re.compile(r"Version: \d+ +File: (\S+)")
_VERSION_NAME = re.compile(r"Name: (\S+) +Flags:")


class StubError(Exception):
    """The libraries can't be made."""


def make_stub_libraries(torch_lib: Path, target: Path) -> list[str]:
    """Make a stand-in for each CUDA library that ``import torch`` needs and that isn't in torch's own folder.

    Args:
        torch_lib: Folder of torch's own libraries.
        target: Folder in which torch looks for others: `torch_lib` is one.

    Returns:
        Names of the libraries. None where torch isn't a CUDA build.

    Raises:
        StubError: A tool is missing, or failed.

    """
    _remove_earlier(target)
    libraries = _loaded(torch_lib)
    stubs = _functions(libraries)
    with tempfile.TemporaryDirectory() as scratch:
        for name, versions in stubs.items():
            _compile(name, versions, Path(scratch), target)
    if stubs:
        (target / NOTE).write_text(
            f"These are not NVIDIA's libraries: every function in them just returns {ERROR}, an error. They let this "
            "torch be imported for tests on a CPU.\n" + "".join(f"{name}\n" for name in sorted(stubs))
        )
    return sorted(stubs)


def _remove_earlier(target: Path) -> None:
    """Remove what an earlier call made, which would be taken for torch's own."""
    if (target / NOTE).exists():
        for name in (target / NOTE).read_text().splitlines()[1:]:
            (target / name).unlink(missing_ok=True)
        (target / NOTE).unlink()


def _loaded(folder: Path) -> list[Path]:
    """Return torch's own libraries that are loaded with `ROOTS`, these included."""
    found: dict[str, Path] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).exists():
            found[name] = folder / name
            waiting += _needed(found[name])
    if missing := [name for name in ROOTS if name not in found]:
        raise StubError(f"{folder} has no {', '.join(missing)}")
    return list(found.values())


def _functions(libraries: Iterable[Path]) -> dict[str, Versions]:
    """Return, by the name of each missing library, the versions and functions that it must have."""
    libraries = list(libraries)
    present = {library.name for library in libraries}
    missing = {name for library in libraries for name in _needed(library)} - present
    stubs: dict[str, Versions] = {name: defaultdict(set) for name in sorted(missing) if _NVIDIA_LIBRARY.match(name)}
    if not stubs:
        return {}
    owner: dict[str, str] = {}
    for library in libraries:
        for file, version in _versions(library):
            if file in stubs:
                owner[version] = file
                stubs[file].setdefault(version, set())
    defined: set[str] = set()
    wanted: set[tuple[str, str]] = set()
    for library in libraries:
        for kind, name, version in _symbols(library):
            if kind == "U":
                wanted.add((name, version))
            elif kind not in "wv":
                defined.add(name)
    for name, version in wanted:
        if version in owner:
            stubs[owner[version]][version].add(name)
        elif not version and name not in defined and _NVIDIA_FUNCTION.match(name):
            stubs[min(stubs)][""].add(name)  # the loader looks through all of them
    return stubs


def _compile(name: str, versions: Versions, scratch: Path, target: Path) -> None:
    source, script = scratch / "stub.c", scratch / "stub.map"
    functions = sorted({function for functions in versions.values() for function in functions})
    source.write_text("".join(f"int {function}(void) {{ return {ERROR}; }}\n" for function in functions) or "\n")
    nodes = [
        f"{version} {{ global: {' '.join(f'{function};' for function in sorted(functions))} }};"
        if functions
        else f"{version} {{ }};"
        for version, functions in sorted(versions.items())
        if version
    ]
    options = [f"-Wl,-soname,{name}"]
    if nodes:
        script.write_text("\n".join(nodes) + "\n")
        options.append(f"-Wl,--version-script={script}")
    made = scratch / name
    # Functions with the names of built-in ones, and with other arguments than theirs, are meant.
    _run("cc", "-w", "-shared", "-fPIC", "-fno-builtin", "-O0", "-o", str(made), str(source), *options)
    shutil.move(made, target / name)


def _needed(library: Path) -> list[str]:
    return _NEEDED.findall(_run("readelf", "-d", "-W", str(library)))


def _versions(library: Path) -> list[tuple[str, str]]:
    """Return pairs of a library's name and a version of its symbols that a library asks for."""
    pairs = []
    file = ""
    for line in _run("readelf", "-V", "-W", str(library)).splitlines():
        if found := _VERSION_FILE.search(line):
            file = found[1]
        elif file and (found := _VERSION_NAME.search(line)):
            pairs.append((file, found[1]))
    return pairs


def _symbols(library: Path) -> list[tuple[str, str, str]]:
    """Return kind, name and version of a library's dynamic symbols; the version is "" where there is none."""
    symbols = []
    for line in _run("nm", "-D", str(library)).splitlines():
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        symbols.append((kind, name, version.removeprefix("@")))
    return symbols


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise StubError(f"{command[0]} is not installed: stub libraries need a C compiler and binutils")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    if done.returncode != 0:
        raise StubError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
