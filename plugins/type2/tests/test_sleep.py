"""Sleep mode, which CPU engines don't have: what vLLM's engine core does for it, to its real scheduler.

Before an engine sleeps, no request is left, transfers have ended, and caches are reset, the connector's too. Then the
paged cache is gone: here its blocks get other contents.
"""

from __future__ import annotations

import random

import pytest

from support.random_walk import Faults, delayed_copies

pytest.importorskip("vllm.v1.core.sched.scheduler")

from vllm.v1.core.sched.interface import PauseState

from kvplug.testing import GroupSpec, Simulation, WrongKVError, generate

KINDS = {
    "full": (GroupSpec(),),
    "window": (GroupSpec(), GroupSpec("sliding", layers=2)),
    "state": (GroupSpec(), GroupSpec("mamba", layers=2)),
}
PROMPTS = [[(7 * number + token) % 250 for token in range(70 + 9 * number)] for number in range(4)]


def spoil(simulation):
    """Discard what the paged cache holds."""
    generator = random.Random(0)
    for layer in simulation.layers:
        layer.array[:] = generator.randrange(1, 100)


def ask(simulation):
    return [simulation.add_request(prompt, 3) for prompt in PROMPTS]


def answered(simulation, ids):
    """Let requests end, compare with what no engine computed, and return the tokens that were loaded."""
    simulation.drain(max_idle_steps=3000)
    for request, prompt in zip(ids, PROMPTS, strict=True):
        assert simulation.finished[request].tokens == generate(prompt, 3)
    return sum(simulation.finished[request].num_external_tokens for request in ids)


@pytest.fixture(params=KINDS)
def simulation(request, monkeypatch):
    """An engine that has stored all prompts, and whose copies are all late from now on."""
    faults = Faults(0, late=0)
    delayed_copies(monkeypatch, faults)
    settings = {"l1_size_per_rank": "16MiB", "model_id": "simulated"}
    with Simulation("Type2Connector", extra_config=settings, groups=KINDS[request.param], num_blocks=128) as made:
        answered(made, ask(made))
        assert made.reset_prefix_cache()
        faults.late = 1
        yield made


def under_way(simulation, ids):
    """Step until requests are loading."""
    for _ in range(20):
        simulation.step()
        if simulation.connector.scheduler.num_transfers:
            return
    raise AssertionError(f"nothing is under way for {ids}")


def test_sleep_and_wake_up(simulation):
    """Transfers that are under way end before the cache goes; nothing of before is used after it."""
    ids = ask(simulation)
    under_way(simulation, ids)
    for request in ids:
        simulation.abort(request)
    simulation.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    simulation.drain(max_idle_steps=3000)
    assert simulation.connector.scheduler.num_transfers == 0
    assert simulation.reset_prefix_cache(running=True, connector=True)
    spoil(simulation)
    ids = ask(simulation)  # they come while it sleeps
    for _ in range(3):
        simulation.step()
    assert not any(simulation.finished[request].tokens for request in ids)
    simulation.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert answered(simulation, ids) == 0
    assert simulation.reset_prefix_cache()
    assert answered(simulation, ask(simulation)) > 0


def test_a_pause_in_which_nothing_is_stepped(simulation):
    """Requests are kept, loads end meanwhile, and all goes on."""
    ids = ask(simulation)
    under_way(simulation, ids)
    simulation.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(3):
        simulation.step()
    simulation.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert answered(simulation, ids) > 0


def test_the_control(simulation):
    """A cache that goes while a request still reads it would be noticed."""
    ids = ask(simulation)
    under_way(simulation, ids)
    simulation.drain(max_idle_steps=3000)
    spoil(simulation)
    with pytest.raises(WrongKVError):
        answered(simulation, ask(simulation))
