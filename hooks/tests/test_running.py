"""What a patch's code can find out about the model that it works for."""

from __future__ import annotations

from types import SimpleNamespace

import importlib_metadata
import pytest

import kvplug_hooks
from kvplug_hooks import architectures, status
from kvplug_hooks.architectures import concerned_architectures, is_concerned
from kvplug_hooks.patches.before_update_states import V1
from kvplug_hooks.patches.hybrid_page_size import HYBRID_PAGE_SIZE
from kvplug_hooks.running import architectures_of, concerns_model, running_config
from kvplug_hooks.status import note, notes

QWEN = "Qwen3_5ForConditionalGeneration"


@pytest.fixture(autouse=True)
def no_notes():
    """What a test finds out isn't known to the next."""
    yield
    for patch_id in notes():
        note(patch_id, None)


def config(*names, resolved=None):
    """A configuration as vLLM has it: what the model's files say, and what vLLM made of it."""
    return SimpleNamespace(model_config=SimpleNamespace(architectures=list(names), architecture=resolved))


def called_with(vllm_config, ask):
    """A function of vLLM's that has the configuration as a variable, and calls another that hasn't."""
    return between(ask)


def between(ask):
    return ask()


class Core:
    """An object of vLLM's that has the configuration as an attribute."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config

    def work(self, ask):
        return between(ask)


@pytest.mark.parametrize("how", [called_with, lambda vllm_config, ask: Core(vllm_config).work(ask)])
def test_the_configuration_is_found_where_the_caller_has_it(how):
    """As a variable or an attribute, however many calls up; something else of that name isn't taken for it."""
    mine = config(QWEN)
    assert how(mine, running_config) is mine
    assert how(None, running_config) is None
    assert how(SimpleNamespace(other=1), running_config) is None
    assert called_with(mine, lambda: how("something else", running_config)) is mine
    assert running_config() is None


def test_both_names_of_an_architecture_count():
    """A fine-tune's own name, and the class that vLLM serves it with."""
    assert architectures_of(config("Fine", QWEN, resolved=QWEN)) == ("Fine", QWEN)
    assert architectures_of(config("Fine", resolved="TransformersForCausalLM")) == ("Fine", "TransformersForCausalLM")
    assert architectures_of(SimpleNamespace(model_config=SimpleNamespace(architectures=None))) == ()


def test_a_model_is_concerned_or_not_and_the_status_says_so():
    """Unknown is not concerned; a patch without architectures concerns every model that can be told."""
    ask = lambda: concerns_model(HYBRID_PAGE_SIZE)
    assert called_with(config("Fine", resolved=QWEN), ask) is True
    assert notes() == {}
    assert called_with(config("LlamaForCausalLM"), ask) is False
    assert "model (LlamaForCausalLM)" in notes()[HYBRID_PAGE_SIZE.id]
    assert ask() is False
    assert "one whose architecture can't be told" in notes()[HYBRID_PAGE_SIZE.id]
    assert called_with(config("Fine", resolved=QWEN), ask) is True
    assert notes() == {}
    assert called_with(config("LlamaForCausalLM"), lambda: concerns_model(V1)) is True
    assert kvplug_hooks.concerns_model is concerns_model
    assert status()[HYBRID_PAGE_SIZE.id].live is False


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"])
def test_the_families_of_the_page_size_patch(name):
    """Qwen3.5 and Qwen3.6, dense and MoE, with and without pictures."""
    assert is_concerned(HYBRID_PAGE_SIZE, [name])
    assert not is_concerned(HYBRID_PAGE_SIZE, ["Qwen3ForCausalLM", "Qwen2_5_VLForConditionalGeneration"])
    assert concerned_architectures(V1) is None


def test_a_package_declares_its_model(monkeypatch):
    """An entry point adds an architecture to those of a patch, and to no other's."""
    points = [
        importlib_metadata.EntryPoint("MineForCausalLM", HYBRID_PAGE_SIZE.id, architectures.GROUP),
        importlib_metadata.EntryPoint("OtherForCausalLM", "another_patch", architectures.GROUP),
    ]

    def entry_points(group):
        assert group == "kvplug.architectures"
        return points

    monkeypatch.setattr(importlib_metadata, "entry_points", entry_points)
    assert is_concerned(HYBRID_PAGE_SIZE, ["MineForCausalLM"])
    assert not is_concerned(HYBRID_PAGE_SIZE, ["OtherForCausalLM"])
    assert called_with(config("MineForCausalLM"), lambda: concerns_model(HYBRID_PAGE_SIZE)) is True


def test_a_declaration_in_real_metadata(sandbox):
    """What the group looks like in a distribution's metadata."""
    sandbox.ship("mine", "")
    (sandbox.folder / "mine-1.0.dist-info/entry_points.txt").write_text(
        "[kvplug.architectures]\nMineForCausalLM = hybrid_page_size\n"
    )
    out = sandbox.run(
        """
        from kvplug_hooks.architectures import concerned_architectures
        from kvplug_hooks.patches.hybrid_page_size import HYBRID_PAGE_SIZE
        print(sorted(concerned_architectures(HYBRID_PAGE_SIZE) - HYBRID_PAGE_SIZE.architectures))
        """
    )
    assert out == "['MineForCausalLM']"
