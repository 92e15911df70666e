"""Prompts that are longer than what may be on its way from L2 at a time, with vLLM's real scheduler."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from kvplug.testing import GroupSpec, Simulation, generate
from support.random_walk import Faults, use_tier

PROMPT = [(11 * token) % 250 for token in range(400)]
KINDS = {
    "full": (GroupSpec(),),
    "window": (GroupSpec(), GroupSpec("sliding", layers=2)),
    "state": (GroupSpec(), GroupSpec("mamba", layers=2)),
}


def settings(**more):
    return {"model_id": "simulated", "l1_size_per_rank": "1MiB", "l2": "random", "l2_load_timeout": 20, **more}


@pytest.fixture(params=KINDS)
def groups(request, monkeypatch):
    """A model whose prompt is in L2."""
    use_tier(monkeypatch, {}, Faults(0, late=0, tier_errors=0))
    monkeypatch.setattr(Faults, "lucky", lambda self, probability: probability > 0.5)  # nothing is forgotten
    with Simulation("Type2Connector", extra_config=settings(), groups=KINDS[request.param], num_blocks=256) as first:
        serve(first, PROMPT)
        while first.connector.scheduler.store.num_pending:
            serve(first, [1])
    return KINDS[request.param]


def serve(simulation, text):
    """Let a request end, and return the tokens that it had loaded."""
    request = simulation.add_request(text, 1)
    simulation.drain(max_idle_steps=3000)
    assert simulation.finished[request].tokens == generate(text, 1)
    return simulation.finished[request].num_external_tokens


def restarted(groups, **more):
    with Simulation("Type2Connector", extra_config=settings(**more), groups=groups, num_blocks=256) as simulation:
        tokens = serve(simulation, PROMPT)
        assert simulation.connector.scheduler.num_parked == 0
        for worker_half in simulation.worker_connectors:
            assert worker_half.worker.stats.totals().get("load_errors", 0) == 0
        return tokens, simulation.connector.scheduler.stats.totals()


def test_all_of_it_is_fetched(groups):
    """What is too much at a time follows: a long prompt is loaded to its end."""
    whole, _ = restarted(groups)
    parts, counts = restarted(groups, l2_prefetch_inflight_per_rank="4KiB")
    assert parts == whole > 380
    assert counts["l2_prefetches_dropped"] > 0, "it was no more than one part"


def test_none_is_fetched_where_nothing_may_be_on_its_way(groups):
    """With 0 nobody waits."""
    tokens, counts = restarted(groups, l2_prefetch_inflight_per_rank=0)
    assert tokens == 0
    assert counts.get("l2_load_timeouts", 0) == 0


def test_a_gap_ends_it(groups, monkeypatch):
    """Beyond a block that L2 has lost, nothing is fetched, and nobody waits until the deadline."""
    from support.random_walk import MemoryTier

    lost = []

    def exists(self, keys, timeout):
        lost.extend(key for key in sorted(self.values)[:1] if not lost)
        return [key in self.values and key not in lost for key in keys]

    monkeypatch.setattr(MemoryTier, "exists", exists)
    _, counts = restarted(groups, l2_prefetch_inflight_per_rank="4KiB")
    assert lost
    assert counts.get("l2_load_timeouts", 0) == 0
