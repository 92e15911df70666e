"""The mixin that makes one call a step of vLLM's own preemption call and of the hook's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import kvplug
from kvplug import compat
from kvplug.hookspecs import has_hooks, needed_hooks
from kvplug.preemption import PreemptionMixin


class Connector(PreemptionMixin):
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def blocks_reused(self, metadata):
        self.told.append(metadata)


@pytest.fixture
def connector():
    return Connector()


def hook(connector, metadata):
    connector.before_blocks_reused(SimpleNamespace(metadata=metadata))


def test_c9_whoever_comes_first_counts(connector):
    """C9: hook and vLLM's own call of one step are one call; the next step's metadata is another."""
    first, second = SimpleNamespace(), SimpleNamespace()
    hook(connector, first)
    connector.handle_preemptions(first)
    connector.handle_preemptions(second)
    hook(connector, second)
    connector.handle_preemptions(second)
    assert connector.told == [first, second]


@pytest.mark.parametrize("ids", [{"a"}, frozenset({"a", "b"})])
def test_c9_ids_before_0_19(connector, ids):
    """C9: with ids there is no metadata to tell steps apart by, and vLLM calls only if something was preempted."""
    connector.handle_preemptions(ids)
    connector.handle_preemptions(ids)
    assert connector.told == [None, None]


def test_metadata_that_equals_is_another_steps(connector):
    """Two steps with nothing to do have metadata that is equal, and not the same."""
    connector.handle_preemptions([])
    connector.handle_preemptions([])
    assert connector.told == [[], []]


def test_instances_are_apart():
    """One connector's steps aren't another's."""
    one, other, metadata = Connector(), Connector(), SimpleNamespace()
    one.handle_preemptions(metadata)
    other.handle_preemptions(metadata)
    assert one.told == other.told == [metadata]


def test_the_method_must_be_implemented():
    """Who mixes it in says what is to be done."""
    with pytest.raises(NotImplementedError):
        PreemptionMixin().handle_preemptions(SimpleNamespace())


def test_optional_hooks_arent_needed():
    """A connector with only optional hooks implements them, and does without."""

    class Both(Connector):
        @kvplug.hookimpl
        def before_update_states(self, step):
            return None

    assert has_hooks(Connector) == {"before_blocks_reused"}
    assert needed_hooks(Connector) == frozenset()
    assert has_hooks(Both) == {"before_blocks_reused", "before_update_states"}
    assert needed_hooks(Both) == {"before_update_states"}


def test_a_connector_with_only_optional_hooks_starts_without_the_patch(monkeypatch):
    """Nothing is checked of the runner; one that needs its hook is refused in the same place."""
    runner = type("GPUModelRunner", (), {"__module__": compat.RUNNER_MODULES["v1"], "execute_model": lambda self: None})
    monkeypatch.setattr(compat, "model_runner_in_use", lambda _: runner)
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))
    worker = SimpleNamespace(name="WORKER")
    compat.require_hook_support(config, worker, Connector)

    class Needing(Connector):
        @kvplug.hookimpl
        def before_update_states(self, step):
            return None

    with pytest.raises(compat.UnsupportedError, match="isn't live"):
        compat.require_hook_support(config, worker, Needing)
