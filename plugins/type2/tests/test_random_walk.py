"""type2 with vLLM's real scheduler and simulated workers: random operations, checked after every step.

The simulated model notices at once if it reads a block that doesn't hold what it should, and so does a look at what
vLLM's own prefix cache holds (`kvplug.testing`).
"""

from __future__ import annotations

import pytest

from kvplug.scheduled.scheduler import SchedulerHalf
from kvplug.scheduled.transfers import Transfers
from kvplug.scheduled.worker import WorkerHalf
from kvplug.testing import GroupSpec, Simulation, SimulationError
from support.random_walk import Faults, Walk, delayed_copies, use_tier

pytestmark = pytest.mark.engine

FULL = (GroupSpec(),)
WINDOW = (GroupSpec(kind="sliding"),)
MIXED = (GroupSpec(), GroupSpec(kind="sliding", layers=2))
LATENT = (GroupSpec(kind="mla", layers=2),)
STATE = (GroupSpec(), GroupSpec(kind="mamba", layers=2))
UNEQUAL = (GroupSpec(), GroupSpec(kind="sliding", layers=2, block_size=32, head_size=2))

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
    "state-async-v2": {"groups": STATE, "asynchronous": True, "runner": "v2"},
    "unequal-blocks": {"groups": UNEQUAL},
    "partial-hits": {"groups": STATE, "prefix_match_unit": 4},
    "state-in-every-block": {"groups": (GroupSpec(), GroupSpec(kind="mamba", layers=2, mamba_mode="all"))},
    "drafts": {"groups": FULL, "num_speculative_tokens": 2, "accept": lambda name, position: position % 3 != 0},
    "two-ranks": {"groups": FULL, "tensor_parallel": 2},
    "two-ranks-mixed": {"groups": tuple(GroupSpec(g.kind, g.layers, heads=2) for g in MIXED), "tensor_parallel": 2},
    "two-stages": {"groups": (GroupSpec(layers=4),), "pipeline_parallel": 2},
}


def walk(kind, monkeypatch, *, seed=1, steps=900, faults=None, values=None, policy="fail", **settings):
    """Walk, and return what was counted."""
    faults = faults or Faults(seed)
    delayed_copies(monkeypatch, faults)
    if "l2" in settings:
        use_tier(monkeypatch, {} if values is None else values, faults)
    extra = {"l1_size_per_rank": "24KiB", "model_id": "simulated", **settings}
    size = {"num_blocks": 48, "max_num_batched_tokens": 64, "max_model_len": 300} | KINDS[kind]
    connector = {
        "kv_connector": "Type2Connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": policy,
    }
    with Simulation(connector, **size) as simulation:
        walked = Walk(simulation, seed)
        walked.run(steps)
        counts = walked.counts
        counts.update(simulation.connector.scheduler.stats.totals())
        counts["preemptions"] = simulation.statistics.preemptions
        counts["promised"] = simulation.statistics.promised_tokens
        for connector in simulation.worker_connectors:
            counts.update(connector.worker.stats.totals())
        counts.update(faults.counts)
        print(kind, {name: count for name, count in sorted(counts.items()) if count})
        return counts


@pytest.mark.parametrize("kind", KINDS)
def test_memory_alone(kind, monkeypatch):
    """Whatever happens, no block is read or written after it was given away, and what was hit is what was loaded."""
    counts = walk(kind, monkeypatch)
    assert counts["promised"] > 0
    assert counts["finished"] > 40
    assert counts["blocks_evicted"] > 0
    assert counts["load_errors"] == counts["save_errors"] == 0


@pytest.mark.parametrize("kind", ["full", "mixed", "state", "two-ranks", "full-async"])
def test_a10_with_an_unreliable_tier(kind, monkeypatch):
    """A10: an L2 tier that is late, forgets, and errs costs hits and nothing else; what it has is fetched and used."""
    counts = walk(kind, monkeypatch, l2="random", l2_load_timeout=0.02, max_parked_requests=3)
    assert counts["l2_blocks_written:random"] > 0
    assert counts["l2_blocks_read:random"] > 0
    assert counts["tier errors"] > 0
    assert counts["finished"] > 40


@pytest.mark.parametrize("policy", ["hits", "evicted"])
def test_write_policies(policy, monkeypatch):
    """What is used, or evicted, goes to L2, evicted blocks as they were before their slots were written again."""
    counts = walk("full", monkeypatch, l2="random", l2_write_policy=policy, l2_load_timeout=0.05)
    assert counts["l2_blocks_written:random"] > 0
    assert counts["l2_blocks_read:random"] > 0


@pytest.mark.parametrize("kind", ["full", "mixed", "state", "two-ranks"])
def test_a8_copies_that_fail(kind, monkeypatch):
    """A8: loads that fail are computed, saves that fail are missing later: no request ends otherwise than it should."""
    counts = walk(kind, monkeypatch, faults=Faults(1, failing_copies=5), policy="recompute")
    assert counts["load_errors"] > 0
    assert counts["save_errors"] > 0
    assert counts["finished"] > 40


@pytest.mark.parametrize("settings", [{"transfer": "layerwise"}, {"save_within_step": True}])
@pytest.mark.parametrize("kind", ["full", "full-v2", "full-async"])
def test_other_ways_of_transfer(kind, settings, monkeypatch):
    """Layer by layer, and within the step, everything holds as well."""
    counts = walk(kind, monkeypatch, **settings)
    assert counts["promised"] > 0
    assert counts["load_errors"] == counts["save_errors"] == 0


# -- Negative controls: each of these protections is needed --------------------------------------------------------


def assert_noticed(kind, monkeypatch, **options):
    """Walk with several seeds, until the fault is noticed. Copies take as long as some steps do, or many."""
    for seed in range(1, 13):
        try:
            walk(kind, monkeypatch, seed=seed, faults=Faults(seed, late=0.8, copy_seconds=0.01 * seed), **options)
        except (SimulationError, AssertionError, ValueError):  # noqa: PERF203
            return
    pytest.fail("the fault wasn't noticed")


def test_control_saves_must_be_waited_for(monkeypatch):
    """Without waiting for saves of blocks that a step overwrites, wrong KV is stored, and noticed."""
    monkeypatch.setattr(Transfers, "reading", lambda self, block_ids: set())
    monkeypatch.setattr(WorkerHalf, "_scatter", scatter_without_waiting)
    assert_noticed("full", monkeypatch)


def scatter_without_waiting(self, part, before):
    return lambda: self._paged_to_load.caches[part.group].scatter(self._slab, part.slots, part.block_ids, hold=False)


def test_control_the_second_runner_overwrites_early(monkeypatch):
    """On the second runner, which zeroes state before it tells the connector, saves must end within their step."""
    inner = WorkerHalf.__init__
    monkeypatch.setattr(
        WorkerHalf, "__init__", lambda self, *args, **kwargs: inner(self, *args, **kwargs | {"zeroes_early": False})
    )
    assert_noticed("state-v2", monkeypatch)


def test_control_promises_must_be_pinned(monkeypatch):
    """If what is promised isn't pinned until it is loaded, it is evicted, and wrong KV is loaded."""
    inner = Transfers.start_load

    def start_load(self, request_id, refs):
        self._store.unpin(refs)
        return inner(self, request_id, ())

    monkeypatch.setattr(Transfers, "start_load", start_load)
    monkeypatch.setattr(Walk, "check", lambda self: None)
    # Two requests' worth of slots, and loads that take long.
    assert_noticed("full", monkeypatch, l1_size_per_rank="8KiB")


def test_control_keys_must_tell_tenants_apart(monkeypatch):
    """If keys were those of other tokens, the walk would notice."""
    inner = SchedulerHalf._has_keys

    def has_keys(self, tracked):
        usable = inner(self, tracked)
        if usable:
            for keys in tracked.keys.by_group:
                keys[:] = [b"%d" % position for position in range(len(keys))]
        return usable

    monkeypatch.setattr(SchedulerHalf, "_has_keys", has_keys)
    assert_noticed("full", monkeypatch)
