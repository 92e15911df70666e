"""The façade that vLLM creates, without an engine."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma

from kvplug.hookspecs import has_hooks
from kvplug_type1.connector import Type1Connector
from kvplug_type1.metadata import Type1Metadata


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


def test_e4_it_says_that_it_takes_one_group():
    """What it declares to vLLM is what is tested: no hybrid KV-cache manager yet."""
    assert not supports_hma(Type1Connector)


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
