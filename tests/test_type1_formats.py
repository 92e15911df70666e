"""type1 with every form of KV: types of numbers, block sizes, quantised weights, latent attention, compiled models.

Each is served cold, from L1, and from a spoilt L1, and compared with an engine without a connector that computes the
same tokens in its steps: with one that hits its own prefix cache, where type1 hits. Else numbers of 16 bits and fewer
would be as far apart as matrix products of other sizes are, which depends on the CPU.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support import cpu_kernels, engines
from support.driver import Adopt, Corrupt, Generate, Put, ResetLocal, Take, drive, type1
from support.llm import compare
from support.models import model_path

pytestmark = pytest.mark.engine

#: How far the two runners are apart.
CLOSE = 1e-5


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


#: Full blocks of 128, 64 and 32 tokens, and some tokens over.
PROMPTS = [prompt(140, 1), prompt(260, 2)]
ASK = Generate(PROMPTS, 4)


def tokens_in_blocks(block_size):
    return sum(len(text) // block_size * block_size for text in PROMPTS)


#: Engines by name. Those that are told apart have blocks of the same number of bytes, and layers of the same names.
ENGINES = {
    "float16": {"model": "llama", "dtype": "float16", "block_size": 128},
    "bfloat16": {"model": "llama", "dtype": "bfloat16", "block_size": 64},
    "awq": {"model": "llama_awq", "dtype": "bfloat16", "block_size": 64},
    "int8": {"model": "llama_int8", "dtype": "bfloat16", "block_size": 64},
    "fp8_e4m3": {"model": "llama", "kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"model": "llama", "kv_cache_dtype": "fp8_e5m2"},
    # vLLM's rotary kernel for CPUs computes something else for this model.
    "latent": {"model": "deepseek", "compilation_config": {"custom_ops": ["none"]}, "block_size": 16},
}


def serve(**arguments):
    """Run a script on an engine whose KV cache or weights may need a kernel that this CPU doesn't have."""
    cpu_kernels.install_missing()
    return drive(**arguments)


_results = {}


def run(runner, name, script, connector=None):
    """Run a script on an engine of `ENGINES`; each only once."""
    key = runner, name, repr(script), connector is None
    if key not in _results:
        arguments = ENGINES[name] | {"model": model_path(ENGINES[name]["model"])}
        _results[key] = engines.run(serve, runner=runner, timeout=300, script=script, connector=connector, **arguments)
    return _results[key]


def plain_outputs(name):
    """Return what an engine without a connector answers, first cold and then from its own prefix cache.

    On the first runner, with which the second one agrees.
    """
    return [r.outputs for r in run("v1", name, [ASK, ASK]).rounds]


def served(runner, name):
    """Serve cold, warm, and from a spoilt L1; take what is in L1 before that."""
    return run(runner, name, [ASK, Take(), ResetLocal(), ASK, Corrupt(), ResetLocal(), ASK], type1())


def assert_differ(outputs, expected):
    """The negative control: the comparison that passed must fail here."""
    with pytest.raises(AssertionError, match="request"):
        compare(outputs, expected, atol=CLOSE)


def check_reuse(runner, name, *, atol=CLOSE):
    """Demand that an engine answers like one without a connector, cold and warm, and not from a spoilt L1."""
    result = served(runner, name)
    cold, warm, spoilt = result.rounds
    expected, expected_warm = plain_outputs(name)
    compare(cold.outputs, expected, atol=CLOSE)
    compare(warm.outputs, expected_warm, atol=atol)
    assert_differ(spoilt.outputs, expected_warm)
    assert cold.counts["tokens_loaded"] == 0
    whole = tokens_in_blocks(ENGINES[name].get("block_size", 32))
    assert [r.counts["tokens_loaded"] for r in (warm, spoilt)] == [whole, whole]
    assert not any(result.leftovers.values()), result.leftovers
    return result.stored[0]


def check_told_apart(runner, name, foreign):
    """Demand that an engine finds nothing in an L1 with the same tokens' blocks of another kind of engine.

    The control lets it have that engine's keys: it then finds them, and answers wrongly.
    """
    script = [Put(foreign), ASK, ResetLocal(), ASK, ResetLocal(), Adopt(foreign), ASK]
    result = run(runner, name, script, type1())
    cold, warm, adopted = result.rounds
    expected, expected_warm = plain_outputs(name)
    compare(cold.outputs, expected, atol=CLOSE)
    compare(warm.outputs, expected_warm, atol=CLOSE)
    whole = tokens_in_blocks(ENGINES[name].get("block_size", 32))
    assert [r.counts["tokens_loaded"] for r in result.rounds] == [0, whole, whole]
    assert_differ(adopted.outputs, expected_warm)
    assert not any(result.leftovers.values()), result.leftovers


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_and_larger_blocks(runner, name):
    """KV of 16 bits a number, in blocks of 128 and of 64 tokens: hits equal a plain engine's outputs."""
    check_reuse(runner, name)


@pytest.mark.parametrize("name", ["awq", "int8"])
def test_quantised_weights(runner, name):
    """A weight-quantised model is reused like any other, and has nothing in common with the model it was made from."""
    check_told_apart(runner, name, check_reuse(runner, "bfloat16"))


def test_fp8_kv_caches(runner):
    """Both kinds of fp8 KV equal a plain engine's, however coarse the numbers are, and they are told apart.

    The tensors have one type, uint8, and the same shape.
    """
    first = check_reuse(runner, "fp8_e4m3")
    check_told_apart(runner, "fp8_e5m2", first)


def test_e2_latent_attention(runner):
    """E2: a model whose KV is one latent vector a token (MLA), all layers in one group.

    vLLM has no prefix cache of its own for it on CPUs. It computes the attention to a cached prefix apart, and merges
    that with the rest's, so hits differ more from what is computed at once.
    """
    check_reuse(runner, "latent", atol=1e-4)


def serve_compiled(**arguments):
    """Run a script on an engine that compiles its model, and return how many models were compiled, too."""
    from vllm.compilation.counter import compilation_counter

    return drive(enforce_eager=False, **arguments), compilation_counter.num_models_seen


def test_compiled_model():
    """With torch.compile, as vLLM does by default, hits equal what the same engine computes.

    A compiled model adds up in another order than an eager one. On the first runner only: with the second one's
    interpreted kernels, the compiler finds no Triton. Compiling takes most of the time: 12 s of one core.
    """
    build = Path(__file__).resolve().parents[1] / "build"
    result, num_models = engines.run(
        serve_compiled,
        timeout=300,
        env={"TORCHDYNAMO_DISABLE": None, "TORCHINDUCTOR_CACHE_DIR": str(build / "inductor-cache")},
        model=model_path("llama_draft"),  # two layers: the time grows with them
        script=[ASK, ResetLocal(), ASK, Corrupt(), ResetLocal(), ASK],
        connector=type1(),
    )
    assert num_models == 1
    cold, warm, spoilt = result.rounds
    eager = engines.run(drive, model=model_path("llama_draft"), script=[ASK])
    compare(cold.outputs, eager.rounds[0].outputs, atol=1e-4)
    compare(warm.outputs, cold.outputs, atol=CLOSE)
    assert_differ(spoilt.outputs, cold.outputs)
    assert [r.counts["tokens_loaded"] for r in result.rounds] == [0, tokens_in_blocks(32), tokens_in_blocks(32)]
