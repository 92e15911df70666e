"""The torchvision that ``make env`` keeps outside of the environment: see `envlib.torchvision`."""

from __future__ import annotations

import pytest
from envlib.torchvision import FOLDER, is_there

from support.env_script import ROOT


def folder() -> str:
    """Return the folder that jobs put into their `sys.path`; skip the test where there is none.

    (Setting ``PYTHONPATH`` for a job does nothing: its interpreter was started before.)
    """
    if not is_there(ROOT / FOLDER):
        pytest.skip(f"{FOLDER} has no torchvision: make env puts it there")
    return str(ROOT / FOLDER)
