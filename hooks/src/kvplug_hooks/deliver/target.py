"""The vLLM that an interpreter would import, found by asking that interpreter, which doesn't import it.

A path that is worked out from outside may be that of another copy, which never serves: only the interpreter knows what
its `.pth` files, variables and user folder make of its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplug_hooks.deliver import bytecode
from kvplug_hooks.deliver.owner import Owner, owner_of
from kvplug_hooks.deliver.states import DeliveryError, Exit
from kvplug_hooks.installed import Tree

__all__ = ["Target", "find"]

_MARK = "kvplug-hooks: "
_TIMEOUT = 120.0

# Run by the interpreter in question, so for any Python 3. Unlike the `vllm` command, `-c` has the current folder on its
# path, where a clone of vLLM may lie. Everything else stays as it is for vLLM: its `.pth` files, variables and
# customisations decide what it imports.
_PROBE = """
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
import importlib.util, json
def origin(name):
    spec = importlib.util.find_spec(name)
    return spec and spec.origin
print("\\n%s" + json.dumps({
    "vllm": origin("vllm"),
    "missing": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None],
    "prefix": sys.prefix,
    "tag": sys.implementation.cache_tag,
    "pycache_prefix": sys.pycache_prefix,
}))
""".replace("%s", _MARK)

# Takes names and sizes, and on standard input the modules' bytes one after the other.
_COMPILE = """
import sys
for name, size in zip(sys.argv[1::2], sys.argv[2::2]):
    compile(sys.stdin.buffer.read(int(size)), name, "exec", dont_inherit=True)
"""


@dataclass(frozen=True)
class Target:
    """An interpreter and its vLLM."""

    #: The interpreter, as it can be run.
    python: str
    #: Its `sys.prefix`.
    prefix: str
    #: As in the names of its bytecode files.
    cache_tag: str
    pycache_prefix: str | None
    tree: Tree
    owner: Owner
    #: Those of the packages asked for that it doesn't find.
    missing: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The version of vLLM."""
        return str(self.tree.version or self.owner.version)

    @property
    def shared(self) -> bool:
        """Whether vLLM comes from elsewhere than the interpreter's own environment, and so may be others' too."""
        return not self.tree.folder.is_relative_to(self.prefix)

    def has_bytecode(self, source: Path) -> bool:
        """Return whether a module has bytecode of the interpreter."""
        tag = f".{self.cache_tag}."
        return any(tag in path.name for path in bytecode.compiled(source, self.pycache_prefix))

    def why_not_valid(self, modules: Mapping[str, bytes]) -> str | None:
        """Return why the interpreter can't compile one of these modules, by name, or None if it can."""
        sizes = [text for name, data in modules.items() for text in (name, str(len(data)))]
        done = _run([self.python, "-I", "-c", _COMPILE, *sizes], b"".join(modules.values()))
        return None if done.returncode == 0 else _last_line(done)

    def compile(self, sources: Sequence[Path]) -> None:
        """Have the interpreter write modules' bytecode. It's a cache: what can't be written, Python does without."""
        if sources:
            where = [] if self.pycache_prefix is None else ["-X", f"pycache_prefix={self.pycache_prefix}"]
            _run([self.python, "-I", *where, "-m", "py_compile", *map(str, sources)])


def find(python: str | Path | None = None, packages: tuple[str, ...] = ()) -> Target:
    """Ask an interpreter for its vLLM.

    Args:
        python: The interpreter, or the folder of its environment; None for the one that runs this.
        packages: Top-level packages that it should have as well; see `Target.missing`.

    Raises:
        DeliveryError: It can't be asked, has no vLLM, or has one whose files must not be changed.

    """
    path = _interpreter(python)
    answer = _ask(path, packages)
    origin = answer["vllm"]
    if origin is None:
        raise DeliveryError(
            f"{path} finds no vLLM; install it there, or name the interpreter that runs vLLM with --python.",
            Exit.NO_VLLM,
        )
    if not os.path.isfile(origin):  # noqa: PTH113 - `origin` may be anything, "frozen" for example
        raise DeliveryError(
            f"The vLLM of {path} isn't in ordinary files ({origin}), so they can't be patched; leave that to the "
            "import (the default), or install vLLM unpacked.",
            Exit.UNSUPPORTED,
        )
    tree = Tree(Path(origin).parent.parent)
    return Target(
        python=path,
        prefix=answer["prefix"],
        cache_tag=answer["tag"],
        pycache_prefix=answer["pycache_prefix"],
        tree=tree,
        owner=owner_of(tree.folder),
        missing=tuple(answer["missing"]),
    )


def _interpreter(python: str | Path | None) -> str:
    if python is None:
        return sys.executable
    # Not resolved: an environment's interpreter is a link, and is that environment's only by the link's name.
    path = Path(python)
    return str(path / "bin" / "python") if path.is_dir() else str(python)


def _ask(python: str, packages: tuple[str, ...]) -> dict[str, Any]:
    done = _run([python, "-B", "-c", _PROBE, *packages])
    for line in reversed(done.stdout.decode("utf-8", "replace").splitlines()):
        _, mark, text = line.partition(_MARK)
        if mark:
            answer: dict[str, Any] = json.loads(text)
            return answer
    raise DeliveryError(
        f"{python} can't be asked for its vLLM ({_last_line(done)}); name a Python interpreter with --python.",
        Exit.NO_VLLM,
    )


def _run(command: list[str], data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    # Set for a framework build's own children, it would make another interpreter take itself for this one.
    environ = {name: value for name, value in os.environ.items() if name != "__PYVENV_LAUNCHER__"}
    try:
        return subprocess.run(  # noqa: S603 - the interpreter that the user named, no shell
            command, input=data, env=environ, capture_output=True, check=False, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"it took longer than {_TIMEOUT:g} s" if isinstance(error, subprocess.TimeoutExpired) else error.strerror
        raise DeliveryError(
            f"{command[0]} can't be run ({why}); name the interpreter that runs vLLM with --python.", Exit.NO_VLLM
        ) from error


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with status {done.returncode} and said nothing of use"
