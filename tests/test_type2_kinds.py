"""type2 with every kind of KV cache: windows, several groups, latent attention, fp8, recurrent state.

Each is served cold, from L1, and from a spoilt L1, and compared with an engine without a connector that computes the
same tokens in its steps: with one that hits its own prefix cache, where type2 hits.
"""

from __future__ import annotations

import sys

import pytest

from support import cpu_kernels, engines
from support.driver import Corrupt, OneByOne, ResetLocal, drive, type2
from support.llm import compare
from support.models import model_path
from support.reuse import CLOSE, assert_differ, assert_nothing_left, hits, loaded, prompt

pytestmark = pytest.mark.engine

#: One longer than three windows, one shorter, one that shares the first one's first 200 tokens.
PROMPTS = [prompt(347, 12), prompt(200, 13)]
PROMPTS.append(PROMPTS[0][:200] + prompt(120, 14))
ASK = OneByOne(PROMPTS, 6)

#: Engines by name, with the tokens of their blocks, and how far hits may differ from what is computed at once.
ENGINES = {
    "window": ({"model": "mistral_sliding", "max_num_batched_tokens": 150}, 32, CLOSE),
    "gemma3": ({"model": "gemma3", "max_num_batched_tokens": 150}, 32, CLOSE),
    "gpt_oss": ({"model": "gpt_oss", "max_num_batched_tokens": 150}, 32, CLOSE),
    "fp8": ({"model": "llama", "kv_cache_dtype": "fp8_e4m3"}, 32, CLOSE),
    # vLLM's rotary kernel for CPUs computes something else for this model.
    "latent": ({"model": "deepseek", "compilation_config": {"custom_ops": ["none"]}, "block_size": 16}, 16, 1e-4),
}


def serve(**arguments):
    """Run a script on an engine whose KV cache may need a kernel that this CPU doesn't have."""
    cpu_kernels.install_missing()
    return drive(**arguments)


_plain = {}


def run_plain(name):
    """Return what an engine without a connector answers, cold and from its own cache, on the first runner."""
    if name not in _plain:
        arguments = ENGINES[name][0] | {"model": model_path(ENGINES[name][0]["model"])}
        _plain[name] = [r.outputs for r in engines.run(serve, timeout=120, script=[ASK, ASK], **arguments).rounds]
    return _plain[name]


@pytest.mark.parametrize("name", ENGINES)
def test_reuse(runner, name):
    """Cold and warm equal a plain engine, blocks are loaded, and a spoilt L1 is noticed.

    Windows: null blocks are neither loaded nor saved, and blocks are saved before the window passes them.
    """
    arguments, block_size, atol = ENGINES[name]
    arguments = arguments | {"model": model_path(arguments["model"])}
    script = [ASK, ResetLocal(), ASK, Corrupt(), ResetLocal(), ASK]
    ours = engines.run(serve, runner=runner, timeout=120, script=script, connector=type2(), **arguments)
    cold, warm, spoilt = ours.rounds
    expected, expected_warm = run_plain(name)
    compare(cold.outputs, expected, atol=CLOSE)
    compare(warm.outputs, expected_warm, atol=atol)
    assert_differ(spoilt.outputs, expected_warm, atol=atol)
    assert hits([warm]) == hits([spoilt])
    assert hits([warm])[0] >= (347 // block_size + 200 // block_size) * block_size
    assert loaded([warm])[0] == loaded([spoilt])[0] > 0
    assert_nothing_left(ours)


STATE_PROMPTS = [prompt(400, 31), prompt(256, 32), prompt(120, 33)]
STATE_PROMPTS.append(STATE_PROMPTS[0][:300] + prompt(60, 34))
STATE_ASK = OneByOne(STATE_PROMPTS, 4)
STATE = {"dtype": "bfloat16", "block_size": 128, "num_gpu_blocks": 64}


def serve_from(*, folder, **arguments):
    """Run a script on an engine that may import from a folder, too."""
    sys.path.append(folder)
    return drive(**arguments)


def check_state(runner, model, budget, job=drive, **more):
    """Demand that a model's state is restored where a plain engine that hits its own prefix cache has it."""
    arguments = STATE | {"model": model_path(model), "max_num_batched_tokens": budget} | more
    plain = engines.run(job, timeout=120, script=[STATE_ASK, STATE_ASK], **arguments)
    script = [STATE_ASK, ResetLocal(), STATE_ASK, Corrupt(), ResetLocal(), STATE_ASK]
    ours = engines.run(job, runner=runner, timeout=120, script=script, connector=type2(), **arguments)
    cold, warm, spoilt = ours.rounds
    compare(cold.outputs, plain.rounds[0].outputs, atol=CLOSE)
    compare(warm.outputs, plain.rounds[1].outputs, atol=CLOSE)
    assert_differ(spoilt.outputs, plain.rounds[1].outputs)
    assert hits([warm])[0] > 0
    assert hits([warm])[0] % 128 == 0
    assert loaded([warm])[0] > 0
    assert_nothing_left(ours)


@pytest.mark.parametrize("budget", [1024, 200])
def test_recurrent_state(runner, budget):
    """State is restored at the ends of blocks where vLLM itself keeps it, and nowhere else.

    So outputs equal those of a plain engine that hits its own prefix cache.
    """
    check_state(runner, "qwen3_next", budget)


def test_recurrent_state_of_qwen35():
    """Qwen3.5 has layers like Qwen3-Next's, but its state is float32 beside a convolution in bfloat16."""
    from support import torchvision  # which jobs, that import this module, can't

    # vLLM's module of the model imports it, also for text alone.
    check_state("v1", "qwen3_5", 200, serve_from, folder=torchvision.folder())
