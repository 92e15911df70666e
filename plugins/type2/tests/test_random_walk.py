"""type2 with vLLM's real scheduler and simulated workers: random operations, checked after every step."""

from __future__ import annotations

import pytest
from support.random_walk import Faults, Walk, delayed_copies, use_tier

from kvplug.testing import GroupSpec, Simulation

pytestmark = pytest.mark.engine

FULL = (GroupSpec(),)
WINDOW = (GroupSpec(kind="sliding"),)
MIXED = (GroupSpec(), GroupSpec(kind="sliding", layers=2))
LATENT = (GroupSpec(kind="mla", layers=2),)
STATE = (GroupSpec(), GroupSpec(kind="mamba", layers=2))

#: By name: what the simulation is given.
KINDS = {
    "full": {"groups": FULL},
    "full-v2": {"groups": FULL, "runner": "v2"},
    "full-async": {"groups": FULL, "asynchronous": True},
    "full-async-v2": {"groups": FULL, "asynchronous": True, "runner": "v2"},
    "no-local-cache": {"groups": FULL, "enable_prefix_caching": False},
    "window": {"groups": WINDOW},
    "mixed": {"groups": MIXED},
    "mixed-v2": {"groups": MIXED, "runner": "v2"},
    "mixed-async": {"groups": MIXED, "asynchronous": True, "num_blocks": 56},
    "latent": {"groups": LATENT},
    "state": {"groups": STATE},
    "state-v2": {"groups": STATE, "runner": "v2"},
    "state-async": {"groups": STATE, "asynchronous": True},
    "drafts": {"groups": FULL, "num_speculative_tokens": 2, "accept": lambda name, position: position % 3 != 0},
    "two-ranks": {"groups": FULL, "tensor_parallel": 2},
    "two-stages": {"groups": (GroupSpec(layers=4),), "pipeline_parallel": 2},
}
STEPS = 600


def walk(kind, monkeypatch, *, seed=1, steps=STEPS, faults=None, values=None, **settings):
    faults = faults or Faults(seed)
    delayed_copies(monkeypatch, faults)
    if "l2" in settings:
        use_tier(monkeypatch, {} if values is None else values, faults)
    extra = {"l1_size_per_rank": "24KiB", "model_id": "simulated", **settings}
    size = {"num_blocks": 48, "max_num_batched_tokens": 64, "max_model_len": 300} | KINDS[kind]
    with Simulation("Type2Connector", extra_config=extra, **size) as simulation:
        walked = Walk(simulation, seed)
        walked.run(steps)
        walked.counts.update(simulation.connector.scheduler.stats.totals())
        walked.counts["preemptions"] = simulation.statistics.preemptions
        walked.counts["promised"] = simulation.statistics.promised_tokens
        for connector in simulation.worker_connectors:
            walked.counts.update(connector.worker.stats.totals())
        return walked


@pytest.mark.parametrize("kind", KINDS)
def test_memory_alone(kind, monkeypatch):
    """Whatever happens, no block is read or written after it was given away, and what was hit is what was loaded."""
    walked = walk(kind, monkeypatch)
    assert walked.counts["promised"] > 0
    assert walked.counts["finished"] > 20
    print(kind, {k: v for k, v in walked.counts.items() if v})
