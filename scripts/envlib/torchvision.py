"""``build/torchvision``: torchvision for a CPU torch, for the tests that need it and for nothing else.

vLLM's module of Qwen3.5 imports it, also for text alone. PyPI's build is for CUDA: beside a CPU torch its compiled
operators can't be loaded, and two of its modules fail because they register functions for these. Without them
everything that is written in Python works. It's kept out of the environment, where it would be found by everything that
asks whether there is a torchvision. Who wants it puts the folder into the module search path (`support.torchvision`
does).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from envlib.environment import say
from envlib.workspace import SetupError

if TYPE_CHECKING:
    from envlib.environment import Environment

#: The one that belongs to the torch of `envlib.current`.
VERSION = "0.28.0"

#: Relative to the root.
FOLDER = Path("build") / "torchvision"

#: Modules that only register functions for the compiled operators.
_REGISTRATIONS = ("_meta_registrations.py", "_autograd_registrations.py")


def provide_torchvision(environment: Environment) -> None:
    """Have it in the clone's folder, or say why not: without it tests of Qwen3.5 skip, or fail on CI."""
    folder = environment.workspace.root / FOLDER
    if is_there(folder):
        return
    # Under another name until it's complete, so that an interrupted set-up leaves nothing that looks right.
    with tempfile.TemporaryDirectory(prefix=".torchvision-", dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        try:
            environment.install(
                f"torchvision {VERSION} into {FOLDER}",
                *("--no-deps", "--target", str(made), f"torchvision=={VERSION}"),
                *environment.options.pip_arguments(),
            )
        except SetupError as error:
            say(f"Qwen3.5 can't be tested: {error}")
            return
        for name in _REGISTRATIONS:
            (made / "torchvision" / name).write_text("")
        shutil.rmtree(folder, ignore_errors=True)  # another version's
        made.rename(folder)


def is_there(folder: Path) -> bool:
    """Whether a folder has the version that belongs to torch, of whatever build."""
    return any(folder.glob(f"torchvision-{VERSION}*.dist-info"))
