"""A simulator for connectors: vLLM's real scheduler and both halves of a connector, with no model.

Needs vLLM, which is imported when a `Simulation` is made. See docs/simulator.md.
"""

from __future__ import annotations

from kvplug.testing.classes import reference
from kvplug.testing.configs import GroupSpec
from kvplug.testing.errors import InvariantError, SimulationError, StuckError, WrongKVError
from kvplug.testing.model import VOCABULARY, generate
from kvplug.testing.records import Finished, Promise, Statistics
from kvplug.testing.simulation import Simulation

__all__ = [
    "VOCABULARY",
    "Finished",
    "GroupSpec",
    "InvariantError",
    "Promise",
    "Simulation",
    "SimulationError",
    "Statistics",
    "StuckError",
    "WrongKVError",
    "generate",
    "reference",
]
