"""type2 under vLLM's `MultiConnector`, with vLLM's real scheduler and simulated workers."""

from __future__ import annotations

import random
import threading
import time

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from kvplug.scheduled.scheduler import SchedulerHalf
from kvplug.testing import Simulation, WrongKVError, generate


def child(size="64KiB"):
    settings = {"model_id": "simulated", "l1_size_per_rank": size}
    return {"kv_connector": "Type2Connector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def both(*children):
    settings = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def prompt(seed, length=80):
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(length)]


def serve(simulation, text):
    """Let a request end, and return it."""
    request = simulation.add_request(text, 1)
    simulation.drain(max_idle_steps=3000)
    assert simulation.finished[request].tokens == generate(text, 1)
    return simulation.finished[request]


def finish(simulation, text):
    """Step until a request has ended, whatever is still under way then."""
    request = simulation.add_request(text, 1)
    while simulation.finished[request].reason is None:
        simulation.step()
        time.sleep(0.001)
    return simulation.finished[request]


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("saver", [0, 1])
def test_another_loads_into_blocks_that_are_being_saved(saver, told, runner, monkeypatch):
    """The save is waited for, whichever comes first, and whether vLLM tells the blocks (0.29 on) or not."""
    if not told:
        inner = SchedulerHalf.given_away
        monkeypatch.setattr(
            SchedulerHalf, "given_away", lambda self, request, blocks: inner(self, request, [[] for _ in blocks])
        )
    assert save_while_another_loads(saver, runner) == 80


def test_the_control(monkeypatch):
    """Without that, what is saved is what the other one loaded."""
    monkeypatch.setattr(SchedulerHalf, "given_away", lambda self, request, blocks: None)
    with pytest.raises(WrongKVError):
        save_while_another_loads(0, "v1", patience=60)


def save_while_another_loads(number, runner, patience=1):
    """Let one child save slowly while the other loads to the same blocks; return what is loaded of the former.

    The save takes `patience` seconds, or until the other one has loaded, if that doesn't wait for the save.
    """
    with Simulation(
        both(child(), child()), num_blocks=8, max_model_len=96, max_num_batched_tokens=96, runner=runner
    ) as simulation:
        theirs, ours = prompt(1), prompt(2)
        serve(simulation, theirs)
        # One has forgotten what the other one keeps.
        simulation.connector._connectors[number].reset_cache()
        serve(simulation, [1])
        simulation.reset_prefix_cache()

        workers = [half.worker for half in simulation.worker_connectors[0]._connectors]
        saver, loader = workers[number]._paged.caches[0], workers[1 - number]._paged_to_load.caches[0]
        gather, scatter, loaded = saver.gather, loader.scatter, threading.Event()

        def save(*args, **kwargs):
            loaded.wait(patience)
            return gather(*args, **kwargs)

        def load(*args, **kwargs):
            transfer = scatter(*args, **kwargs)
            transfer.wait()
            loaded.set()
            return transfer

        saver.gather, loader.scatter = save, load
        finish(simulation, ours)
        simulation.reset_prefix_cache()
        assert finish(simulation, theirs).num_external_tokens == 80
        simulation.drain(max_idle_steps=3000)
        saver.gather, loader.scatter = gather, scatter
        serve(simulation, [1])
        simulation.reset_prefix_cache()
        return serve(simulation, ours).num_external_tokens


@pytest.mark.parametrize("sizes", [("64KiB", "8KiB"), ("8KiB", "64KiB")])
def test_each_has_its_own_memory(sizes):
    """`MultiConnector` gives all the handshake of the first."""
    with Simulation(both(*map(child, sizes)), num_blocks=48) as simulation:
        for seed in range(8):
            serve(simulation, prompt(seed))
        halves = zip(simulation.worker_connectors[0]._connectors, simulation.connector._connectors, strict=True)
        for worker_half, scheduler_half in halves:
            slots = worker_half.worker._slab.num_slots
            assert scheduler_half.scheduler.store.allocator.capacity == slots
            assert worker_half.worker.stats.totals().get("save_errors", 0) == 0
