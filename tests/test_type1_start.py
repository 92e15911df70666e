"""What type1 refuses when an engine starts: one clear sentence that ends with the remedy."""

from __future__ import annotations

import importlib

import pytest

from support import engines
from support import llm as engine
from support.driver import TYPE1, type1

pytestmark = pytest.mark.engine


def refused(*, model, connector, import_first=None, **engine_args):
    """Try to start an engine, and return the messages of the errors that came of it."""
    if import_first:
        importlib.import_module(import_first)
    try:
        engine.make_llm(model, connector=connector, **engine_args)
    except Exception as error:  # noqa: BLE001 - whatever it is, its text is what a user sees
        messages = []
        cause = error
        while cause is not None:
            messages.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        return "\n".join(messages)
    return None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"l1_size_per_ran": "1GiB"}, r"'l1_size_per_ran' .* is unknown: did you mean 'l1_size_per_rank'\?"),
        ({"l1_size_per_rank": "100TiB"}, r"ConfigError: .*l1_size_per_rank"),
        ({"l1_size_per_rank": "a lot"}, r"l1_size_per_rank .*'a lot'"),
        ({"l1_size_per_rank": 100}, r"holds no block"),
        ({"l1_eviction_policy": "lfu"}, r"l1_eviction_policy"),
    ],
)
def test_bad_settings(models, settings, sentence):
    """A misspelt key, a size beyond the machine or below one block, a policy that isn't there: refused at start."""
    error = engines.run(refused, model=models("llama"), connector=type1(**settings))
    assert error is not None
    engine_lines = [line for line in error.splitlines() if "ConfigError" in line or "Setting" in line]
    import re

    assert re.search(sentence, "\n".join(engine_lines)), error


def test_a_missing_hook(runner, models):
    """H13: without the patch type1 refuses in the worker, whichever runner is used, and says how to get it.

    VLLM_PLUGINS keeps kvplug from being called, and a module path still finds the class: the classic silent trap.
    """
    connector = TYPE1 | {"kv_connector_module_path": "kvplug_type1.connector"}
    error = engines.run(
        refused, runner=runner, env={"VLLM_PLUGINS": "something_else"}, model=models("llama"), connector=connector
    )
    module = "vllm.v1.worker.gpu.model_runner" if runner == "v2" else "vllm.v1.worker.gpu_model_runner"
    assert error is not None
    assert f"UnsupportedError: Type1Connector needs kvplug's hook in {module}, where it isn't live" in error
    assert "VLLM_PLUGINS" in error
    assert "kvplug doctor" in error


def test_a_runner_imported_too_early(models):
    """A runner that was imported before vLLM's plugins ran has no hook: the refusal says so."""
    error = engines.run(refused, import_first="vllm.v1.worker.gpu_model_runner", model=models("llama"), connector=TYPE1)
    assert error is not None
    assert "UnsupportedError: Type1Connector needs kvplug's hook" in error
    assert "before" in error


def test_e5_recurrent_state(models):
    """E5: a model with recurrent state is refused, with where to go."""
    error = engines.run(refused, model=models("qwen3_next"), connector=TYPE1, dtype="bfloat16", block_size=128)
    assert error is not None
    assert "UnsupportedError: Type1Connector can't load recurrent state" in error
    assert "Type2Connector" in error


def test_a_name_that_nobody_has(models):
    """The control: without kvplug's plugin the name isn't known to vLLM at all."""
    error = engines.run(refused, env={"VLLM_PLUGINS": ""}, model=models("llama"), connector=TYPE1)
    assert error is not None
    assert "Unsupported connector type: Type1Connector" in error
    assert engines.run(refused, model=models("llama"), connector=TYPE1) is None
