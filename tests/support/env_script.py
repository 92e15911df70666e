"""The set-up script as a module, for the tests about it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

#: The clone that the tests are in.
ROOT = Path(__file__).resolve().parents[2]

_SCRIPTS = ROOT / "scripts"


def load_setup_env() -> ModuleType:
    """Return ``scripts/setup_env.py`` as a module of its own: changes to it reach nobody else."""
    if str(_SCRIPTS) not in sys.path:
        sys.path.append(str(_SCRIPTS))  # as it is where the script runs
    spec = importlib.util.spec_from_file_location("setup_env", _SCRIPTS / "setup_env.py")
    if spec is None or spec.loader is None:
        raise ImportError("scripts/setup_env.py is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
