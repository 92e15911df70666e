"""The façade that vLLM creates, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma

from kvplug.errors import UnsupportedError
from kvplug.hookspecs import has_hooks
from kvplug_type1.connector import Type1Connector, _attention_groups
from kvplug_type1.metadata import Type1Metadata
from support.type1_steps import Request, make


@pytest.fixture
def bare():
    """A worker's connector before its paged cache is known."""
    connector = object.__new__(Type1Connector)
    connector._connector_metadata = None
    connector._scheduler = connector._worker = None
    return connector


def test_it_implements_the_hook_that_it_needs():
    """One hook, found by its mark."""
    assert has_hooks(Type1Connector) == {"before_update_states"}


def test_e4_it_says_that_it_takes_several_groups():
    """What it declares to vLLM is what is tested: the hybrid KV-cache manager stays on."""
    assert supports_hma(Type1Connector)


def test_e5_recurrent_state_is_refused():
    """E5: a prefix without the recurrent state that goes with it would be wrong: refused, with where to go."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    groups = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=spec) for name, spec in (("a", attention), ("b", state))
    ]
    with pytest.raises(UnsupportedError, match=r"X can't load recurrent state, .*layer b.*Type2Connector"):
        _attention_groups(SimpleNamespace(num_blocks=9, kv_cache_groups=groups), "X")


def test_a_model_without_a_kv_cache_is_refused():
    """There is nothing to store of it."""
    with pytest.raises(UnsupportedError, match="no KV cache"):
        _attention_groups(SimpleNamespace(num_blocks=9, kv_cache_groups=[]), "X")


def test_both_ends_of_a_request_are_taken(bare):
    """However vLLM says that a request has finished, its blocks are free at once."""
    bare._scheduler = make()
    for finish, blocks in ((bare.request_finished, [1, 2]), (bare.request_finished_all_groups, ([1], [2]))):
        request = Request("a", range(8))
        bare.on_new_request(request)
        assert finish(request, blocks) == (False, None)
        assert bare.scheduler.num_tracked_requests == 0


def test_e7_without_metadata_nothing_happens(bare):
    """Dummy and warm-up runs call layer hooks and wait_for_save without bound metadata."""
    bare.start_load_kv(None)
    bare.wait_for_layer_load("layer.0")
    bare.save_kv_layer("layer.0", None, None)
    bare.wait_for_save()


def test_f3_it_never_reports_a_transfer(bare):
    """Loads and saves end within the step: vLLM waits for none, and an id reported twice would end the engine."""
    assert bare.get_finished({"a"}) == (None, None)
    assert bare.get_block_ids_with_load_errors() == set()
    assert bare.requires_kv_delivery is False


@pytest.mark.parametrize("news", [set(), {"a"}, Type1Metadata()])
def test_c9_vllms_own_preemption_call_is_taken_in_every_form(bare, news):
    """Before 0.19 it brings ids, after it metadata: either is fine, since saves never outlive their step."""
    bare.handle_preemptions(news)


def test_every_abstract_method_is_there():
    """Nothing is missing that vLLM demands."""
    assert issubclass(Type1Connector, KVConnectorBase_V1)
    assert not Type1Connector.__abstractmethods__
