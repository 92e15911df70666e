"""F7: every `--kv-transfer-config` that our pages show is one that vLLM takes, and its connectors can be made."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import engines

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    path
    for pattern in ("README.md", "docs/**/*.md", "core/*.md", "hooks/*.md", "plugins/*/*.md", "examples/*/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def samples_of(text):
    """Return the configurations in a page: the outermost JSON objects that name a connector.

    Raises ValueError if something that names a connector is in none of them, and so can't be checked.
    """
    samples = []
    position = named = 0
    while (start := text.find("{", position)) >= 0:
        position = start + 1
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except json.JSONDecodeError:
            continue
        if "kv_connector" in value:
            samples.append(value)
            named += text.count('"kv_connector"', start, end)
            position = end
    if named != text.count('"kv_connector"'):
        raise ValueError("a sample configuration isn't JSON")
    return samples


def make_connectors(*, model, samples):
    """Make both halves of each sample's connector, as vLLM does; return what went wrong, by sample."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    importlib.import_module("vllm.v1.worker.gpu_model_runner")  # where the hook has to be live
    # A page may show a size that this machine doesn't have.
    for connector in ("kvplug_type1.connector", "kvplug.scheduled.connector"):
        importlib.import_module(connector).check_memory = lambda *_args, **_kwargs: None
    sys.path.append(str(ROOT / "examples" / "hostcache" / "src"))
    KVConnectorFactory.register_connector("HostCacheConnector", "hostcache.connector", "HostCacheConnector")
    problems = {name: problem_with(sample, model) for name, sample in samples}
    return {name: problem for name, problem in problems.items() if problem}


def problem_with(sample, model):
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
    kv_cache = SimpleNamespace(num_blocks=8, kv_cache_groups=[group], kv_cache_tensors=[])
    try:
        arguments = EngineArgs(model=model, dtype="float32", max_model_len=256, kv_transfer_config=sample)
        config = arguments.create_engine_config()
        for role in KVConnectorRole:
            KVConnectorFactory.create_connector(config, role, kv_cache)
    except Exception as error:  # noqa: BLE001 - whatever a reader of the page would get
        return repr(error)
    return None


def test_the_pages_are_found():
    """There are samples to check, and text that only looks like one is refused."""
    found = [sample for page in PAGES for sample in samples_of(page.read_text())]
    assert {sample["kv_connector"] for sample in found} >= {"Type1Connector", "Type2Connector", "HostCacheConnector"}
    with pytest.raises(ValueError, match="isn't JSON"):
        samples_of("""--kv-transfer-config '{"kv_connector": "X",}'""")
    nested = '{"kv_connector": "M", "kv_connector_extra_config": {"connectors": [{"kv_connector": "X"}]}}'
    assert samples_of(f"text { {1} } {nested}") == [json.loads(nested)]
    for page in PAGES:
        options = re.findall(r"--kv-transfer-config[= ]+'", page.read_text())
        assert len(options) <= len(samples_of(page.read_text())), page


@pytest.mark.engine
def test_f7_every_sample_configuration_works(models):
    """F7: vLLM parses each of them, and creates its connectors on both sides; the controls are refused."""
    samples = [
        (f"{page.relative_to(ROOT)} {number}", sample)
        for page in PAGES
        for number, sample in enumerate(samples_of(page.read_text()), 1)
    ]
    good = {"kv_connector": "Type1Connector", "kv_role": "kv_both"}
    controls = {
        "a name": good | {"kv_connector": "Type1Conector"},
        "a field": good | {"kv_rolle": "kv_both"},
        "a setting": good | {"kv_connector_extra_config": {"l1_size": "1GiB"}},
    }
    wrong = engines.run(make_connectors, model=models("llama"), samples=[*samples, *controls.items()], timeout=600)
    assert wrong.keys() == controls.keys(), wrong
