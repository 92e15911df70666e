#!/usr/bin/env python3
"""Makes ``.venv``, the environment of the checks, the tests and the demo; leaves one alone that is right already.

Run it as ``make env``, or ``python3 scripts/setup_env.py [--torch-index URL] [--find-links DIR]``. It needs nothing but
Python and pip. It installs, in this order:

1. the engine: vLLM's CPU build and the CPU build of torch that it pins, less three packages whose builds on PyPI are
   for CUDA and break ``import vllm`` beside a CPU torch,
2. the members of the workspace, editable, and the ``dev`` dependency group, as the root ``pyproject.toml`` has them.

A stamp in the environment says which of the two stages are complete and what they were made from. Where the
second one is out of date only that is done again.

With ``--vllm 0.19.1`` (``make env-0.19``) it makes ``.venv-0.19`` in the same way, for ``make test-0.19``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from envlib.current import CurrentEnvironment
from envlib.environment import Environment, Options, say
from envlib.system_libraries import provide_libraries
from envlib.torchvision import provide_torchvision
from envlib.v019 import V019Environment
from envlib.workspace import SetupError, Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: By vLLM's version.
ENVIRONMENTS: dict[str, type[Environment]] = {
    kind.vllm.partition("==")[2]: kind for kind in (CurrentEnvironment, V019Environment)
}


def find_python(kind: type[Environment]) -> str:
    """Return an interpreter that an environment's vLLM has wheels for: this one if it fits, else one on the path.

    Raises:
        SetupError: there is none.
    """
    lowest, limit = kind.pythons
    if lowest <= sys.version_info[:2] < limit:
        return sys.executable
    for minor in range(limit[1] - 1, lowest[1] - 1, -1):
        candidate = shutil.which(f"python{limit[0]}.{minor}")
        if candidate is not None and _succeeds([candidate, "-c", "import ensurepip, venv"]):
            return candidate
    raise SetupError(
        f"{kind.vllm} needs Python {lowest[0]}.{lowest[1]} to {limit[0]}.{limit[1] - 1}, this is "
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


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make an environment of the clone that this file is in; return an exit status."""
    parser = argparse.ArgumentParser(prog="make env", description="Makes .venv, or leaves it alone where it is right.")
    parser.add_argument("--torch-index", metavar="URL", help="package index that has the CPU build of torch")
    parser.add_argument("--find-links", metavar="DIR", help="folder, or page, that has the CPU build of torch")
    parser.add_argument(
        "--vllm", choices=list(ENVIRONMENTS), default=next(iter(ENVIRONMENTS)), help="engine to install"
    )
    given = parser.parse_args(arguments)
    root = Path(__file__).resolve().parents[1]
    kind = ENVIRONMENTS[given.vllm]
    try:
        python = find_python(kind)
        if python != sys.executable:
            return subprocess.run([python, __file__, *sys.argv[1:]], check=False).returncode
        with only_one(root):
            environment = kind(Workspace.read(root), Options(given.torch_index, given.find_links))
            environment.ensure()
            if kind is CurrentEnvironment:
                provide_libraries(root)
                provide_torchvision(environment)
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up was interrupted: the next one takes it up again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
