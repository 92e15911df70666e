"""`hybrid_page_size` on vLLM 0.19.1, a release that needs it: a hybrid model starts and answers as it should."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from support import engines
from support import llm as engine
from support.engines import JobError

pytestmark = pytest.mark.engine

#: K and V of 32 tokens, 2 heads and 32 float32 each: a page of attention.
PAGE = 2 * 32 * 2 * 32 * 4
#: A state that is as large as that, and one that doesn't divide it.
EVEN, UNEVEN = PAGE // 4, 3000
#: The two engines' sums are rounded differently, by some 1e-7. A state of another request changes far more.
CLOSE = 1e-5
SPAWNED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the model's distribution, which declares that the patch concerns its architecture."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).with_name("acme_hybrid.py"), folder)
    metadata = folder / "acme_hybrid-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hybrid\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nacme_hybrid = acme_hybrid:register\n"
        "[kvplug.architectures]\nAcmeHybridForCausalLM = hybrid_page_size\n"
    )
    return str(folder)


@pytest.fixture
def hybrid(models, tmp_path):
    """Return a function that makes the model with a state of so many floats; its weights are those of `llama`."""

    def make(floats):
        source, folder = Path(models("llama")), tmp_path / f"state-{floats}"
        folder.mkdir()
        for path in source.iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path)
        config = json.loads((source / "config.json").read_text())
        config |= {"architectures": ["AcmeHybridForCausalLM"], "acme_state_floats": floats}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


def pages(worker):
    """Return what the worker was given: kind, size and padding of the pages of each group."""
    return [
        (type(group.kv_cache_spec).__name__, group.kv_cache_spec.page_size_bytes, group.kv_cache_spec.page_size_padded)
        for group in worker.model_runner.kv_cache_config.kv_cache_groups
    ]


def answers(*, site, model, prompts):
    """Serve a model; return the answers and the worker's pages."""
    import sys

    import cloudpickle

    sys.path.insert(0, site)
    os.environ["PYTHONPATH"] = site
    cloudpickle.register_pickle_by_value(sys.modules[pages.__module__])
    from vllm import LLM

    llm = LLM(
        model,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=64,
        max_model_len=256,
        enable_prefix_caching=False,
    )
    return engine.generate(llm, prompts, 8), llm.collective_rpc(pages)[0]


def run(site, model, env):
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (40, 70, 33)]
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **env}
    return engines.run(answers, timeout=300, env=env, site=site, model=model, prompts=prompts)


def test_a_hybrid_model_starts_in_a_spawned_engine_core(site, hybrid):
    """With uneven pages, the padded model gives the answers of one whose pages are even by themselves."""
    expected, even = run(site, hybrid(EVEN), {})
    padded, uneven = run(site, hybrid(UNEVEN), SPAWNED)
    assert even == [("FullAttentionSpec", PAGE, None), ("MambaSpec", PAGE, None)]
    assert uneven == [("FullAttentionSpec", PAGE, None), ("MambaSpec", PAGE, PAGE)]
    assert len({tuple(output.tokens) for output in expected}) == len(expected)
    engine.compare(padded, expected, atol=CLOSE)


@pytest.mark.parametrize("env", [{"VLLM_PLUGINS": "acme_hybrid"}, {**SPAWNED, "VLLM_PLUGINS": "acme_hybrid"}])
def test_without_the_patch_it_does_not_start(site, hybrid, env):
    """The negative control: without kvplug, vLLM's own function raises, in one process and in a spawned core."""
    with pytest.raises(JobError, match="NotImplementedError: The page size of the layer is not divisible"):
        run(site, hybrid(UNEVEN), env)
