"""Two engines that hand prompts over, with vLLM's real scheduler and simulated workers, through random operations.

The simulated model notices at once if it reads a block that doesn't hold what it should (`kvplug.testing`).
"""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from kvplug import keys
from kvplug.scheduled import lookups
from kvplug.testing import GroupSpec, Simulation, SimulationError
from support.random_walk import Faults, Walk, delayed_copies, use_tier

pytestmark = pytest.mark.engine

FULL = (GroupSpec(),)
MIXED = (GroupSpec(), GroupSpec(kind="sliding", layers=2))
STATE = (GroupSpec(), GroupSpec(kind="mamba", layers=2))
KINDS = {
    "full": {"groups": FULL},
    "full-v2": {"groups": FULL, "runner": "v2"},
    "full-async": {"groups": FULL, "asynchronous": True},
    "window": {"groups": (GroupSpec(kind="sliding"),)},
    "mixed": {"groups": MIXED},
    "mixed-async": {"groups": MIXED, "asynchronous": True, "num_blocks": 56},
    "state": {"groups": STATE},
    "state-v2": {"groups": STATE, "runner": "v2"},
    "state-async": {"groups": STATE, "asynchronous": True},
    "state-in-every-block": {"groups": (GroupSpec(), GroupSpec(kind="mamba", layers=2, mamba_mode="all"))},
    "two-ranks": {"groups": FULL, "tensor_parallel": 2},
}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Pair:
    """Walks through two engines: what one prefills, the other one decodes, mostly."""

    def __init__(self, prefill: Walk, decode: Walk) -> None:
        self.walks = (prefill, decode)
        self.random = prefill.random
        self.prefills: dict[tuple[int, str], tuple] = {}
        decode.stems = prefill.stems
        self.counts: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        for step in range(steps):
            number = self.random.randrange(2)
            walk = self.walks[number]
            if self.random.random() < 0.25:
                self.prefill(number)
            walk.operate()
            walk.simulation.step()
            walk.simulation.check(contents=step % walk.content_every == 0)
            walk.check()
            self.hand_over(number)
        for walk in self.walks:
            walk.drain()

    def prefill(self, number: int) -> None:
        """Add a request that is to be decoded by the other engine. Not many: each is waited for."""
        walk = self.walks[number]
        if sum(which == number for which, _ in self.prefills) > 5:
            return
        stem = self.random.choice(walk.stems)
        prompt = stem[: self.random.randrange(1, walk.longest)]
        salt = self.random.choice([None, None, "tenant"])
        tokens = self.random.choice([1, 1, 1, 3])
        name = walk.simulation.add_request(prompt, tokens, cache_salt=salt, kv_transfer_params=dict(PREFILL))
        walk.live.append(name)
        self.prefills[number, name] = (prompt, salt)

    def hand_over(self, number: int) -> None:
        """Give what has been prefilled to the other engine, with parameters as they are, lost, or another's."""
        simulation, other = self.walks[number].simulation, self.walks[1 - number]
        for which, name in list(self.prefills):
            if which != number or simulation.finished[name].reason is None:
                continue
            done = simulation.finished[name]
            prompt, salt = self.prefills.pop((which, name))
            if self.random.random() < 0.1:
                continue
            params = self.random.choice([done.kv_transfer_params] * 6 + [None, {"do_remote_prefill": True}])
            tokens = self.random.choice([1, 2, 20])
            request = other.simulation.add_request(prompt, tokens, cache_salt=salt, kv_transfer_params=params)
            other.live.append(request)
            other.prompts[request] = (prompt, tokens, salt)
            self.counts["handed over"] += 1


def walk(kind, monkeypatch, *, seed=1, steps=700, faults=None, policy="fail", values=None, **settings):
    """Walk, and return what was counted on both engines."""
    faults = faults or Faults(seed, tier_errors=0.002)
    delayed_copies(monkeypatch, faults)
    use_tier(monkeypatch, {} if values is None else values, faults)
    extra = {"l1_size_per_rank": "48KiB", "model_id": "simulated", "l2": "random", "min_reuse_tokens": 1}
    extra |= {"l2_load_timeout": 0.05, "handover_timeout": 0.05, **settings}
    size = {"num_blocks": 48, "max_num_batched_tokens": 64, "max_model_len": 300} | KINDS[kind]
    connector = {
        "kv_connector": "PDReuseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": policy,
    }
    counts = Counter()
    with contextlib.ExitStack() as stack:
        walks = [Walk(stack.enter_context(Simulation(connector, **size)), seed) for _ in range(2)]
        pair = Pair(*walks)
        pair.run(steps)
        counts.update(pair.counts)
        for one in walks:
            counts.update(one.counts)
            counts.update(one.simulation.connector.scheduler.stats.totals())
            counts["preemptions"] += one.simulation.statistics.preemptions
            for connector_half in one.simulation.worker_connectors:
                counts.update(connector_half.worker.stats.totals())
        counts.update(faults.counts)
    print(kind, {name: count for name, count in sorted(counts.items()) if count})
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_two_engines(kind, monkeypatch):
    """Whatever happens on either engine, no request computes with KV that isn't its own, and all blocks come back."""
    counts = walk(kind, monkeypatch)
    assert counts["handed over"] > 20
    assert counts["handovers"] > 15
    assert counts["finished"] > 40
    assert counts["l2_blocks_read:random"] > 0
    assert counts["load_errors"] == counts["save_errors"] == 0


@pytest.mark.parametrize("kind", ["full", "mixed", "state"])
def test_copies_that_fail(kind, monkeypatch):
    """A8: loads that fail are computed, saves that fail are missing later."""
    counts = walk(kind, monkeypatch, faults=Faults(1, failing_copies=5, tier_errors=0.002), policy="recompute")
    assert counts["load_errors"] > 0
    assert counts["save_errors"] > 0
    assert counts["finished"] > 40


# -- Negative controls: each of these protections is needed --------------------------------------------------------


def assert_noticed(kind, monkeypatch, **options):
    """Walk with several seeds, until the fault is noticed."""
    for seed in range(1, 13):
        try:
            walk(kind, monkeypatch, seed=seed, steps=300, faults=Faults(seed, tier_errors=0), **options)
        except (SimulationError, AssertionError, ValueError):  # noqa: PERF203
            return
    pytest.fail("the fault wasn't noticed")


def test_control_a_tails_key_has_its_tokens(monkeypatch):
    """If a tail's key were only its length, another prompt's would be loaded."""
    inner = keys.KeyChain.tail
    monkeypatch.setattr(
        keys.KeyChain, "tail", lambda self, tokens, stop: inner(self, tokens, stop) and b"%032d" % (stop % 16)
    )
    assert_noticed("full", monkeypatch)


def test_control_the_last_token_needs_its_window(monkeypatch):
    """If all tokens were promised, vLLM would compute the last one without the first block of its window."""
    monkeypatch.setattr(lookups, "num_loadable", lambda tokens, groups, *, asynchronous: tokens if tokens > 1 else 0)
    monkeypatch.setattr(
        "kvplug_pd_reuse.scheduler.num_loadable", lambda tokens, groups, *, asynchronous: tokens if tokens > 1 else 0
    )
    assert_noticed("window", monkeypatch)
