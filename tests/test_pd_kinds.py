"""pd_reuse with every kind of KV cache: windows, several groups, latent attention, fp8, bf16, recurrent state.

A prompt is prefilled by one engine and decoded by another one, and the outputs equal those of an engine without a
connector that computes the same tokens in its steps: the last one of the prompt in a step of its own.
"""

from __future__ import annotations

import pytest

from support import cpu_kernels, engines
from support import llm as engine
from support.driver import Corrupt, Generate, ResetLocal, decode, deliver, drive, pd_reuse, prefill
from support.llm import compare
from support.models import model_path
from support.reuse import CLOSE, assert_differ, assert_nothing_left, prompt

pytestmark = pytest.mark.engine

#: Engines by name, with the tokens of their blocks, and how far outputs may differ.
ENGINES = {
    "window": ({"model": "mistral_sliding", "max_num_batched_tokens": 150}, 32, CLOSE),
    "gemma3": ({"model": "gemma3", "max_num_batched_tokens": 150}, 32, CLOSE),
    "gpt_oss": ({"model": "gpt_oss", "max_num_batched_tokens": 150}, 32, CLOSE),
    "fp8": ({"model": "llama", "kv_cache_dtype": "fp8_e4m3"}, 32, CLOSE),
    "bf16": ({"model": "llama", "dtype": "bfloat16"}, 32, CLOSE),
    # vLLM's rotary kernel for CPUs computes something else for this model, and it takes no prompt in pieces.
    "latent": ({"model": "deepseek", "compilation_config": {"custom_ops": ["none"]}, "block_size": 16}, 16, 1e-4),
    "state": ({"model": "qwen3_next", "dtype": "bfloat16", "block_size": 128, "num_gpu_blocks": 64}, 128, CLOSE),
}


def last_alone(llm):
    """Compute, from now on, the last token of a prompt in a step of its own, as a decode engine does.

    A step for an engine that has one request at a time.
    """
    scheduler = engine.scheduler(llm)
    inner, budget = scheduler.schedule, scheduler.max_num_scheduled_tokens

    def schedule(*args, **kwargs):
        requests = [*scheduler.running, *scheduler.waiting]
        rest = [request.num_prompt_tokens - request.num_computed_tokens for request in requests]
        scheduler.max_num_scheduled_tokens = min([budget, *(tokens - 1 for tokens in rest if tokens > 1)])
        return inner(*args, **kwargs)

    scheduler.schedule = schedule


def serve(*, model, alone=False, script, **arguments):
    """Run a script on an engine whose KV cache may need a kernel that this CPU doesn't have."""
    cpu_kernels.install_missing()
    return drive(model=model, script=[last_alone, *script] if alone else script, **arguments)


def outputs(rounds):
    return [output for round_ in rounds for output in round_.outputs]


_plain = {}


def run_plain(name, arguments, texts):
    """Return what an engine without a connector answers, on the first runner."""
    if name not in _plain:
        script = [Generate([text], 4) for text in texts]
        rounds = engines.run(serve, timeout=120, script=script, alone=name != "latent", **arguments).rounds
        _plain[name] = outputs(rounds)
    return _plain[name]


@pytest.mark.parametrize(("name", "runner"), [*((name, "v1") for name in ENGINES), ("gemma3", "v2"), ("state", "v2")])
def test_one_token_is_computed_of_every_kind(name, runner, tmp_path):
    """The decode engine computes one token of a prompt, the last one, and answers as a plain engine.

    Prompts end around blocks' ends; the last one is longer than windows, and is prefilled in several steps. State is
    stored before the last token, which would be in it otherwise. A spoilt L1 is noticed with each prompt.
    """
    arguments, block, atol = ENGINES[name]
    arguments = arguments | {"model": model_path(arguments["model"])}
    lengths = [2, block - 1, block, block + 1, 2 * block, 2 * block + 1, 347]
    texts = [prompt(length, length) for length in lengths]
    plain = run_plain(name, arguments, texts)
    connector = pd_reuse(l2="disk", disk_path=str(tmp_path / "l2"), disk_size="256MiB", handover_timeout=10)

    def run(script):
        return engines.run(serve, runner=runner, timeout=120, script=script, connector=connector, **arguments)

    first = run([*(prefill([text]) for text in texts), deliver])
    params = [round_.params[0] for round_ in first.rounds]
    dropped = name == "state"
    assert [round_.num_scheduled for round_ in first.rounds] == [length - dropped for length in lengths]
    if not dropped:  # the token that comes is another one then
        compare(outputs(first.rounds), [output.first(1) for output in plain], atol=atol)
    ask = [decode([text], [own], 4) for text, own in zip(texts, params, strict=True)]
    second = run([*ask, Corrupt(), ResetLocal(), *ask])
    done, spoilt = second.rounds[: len(texts)], second.rounds[len(texts) :]
    assert [round_.counts["handover_tokens_computed"] for round_ in second.rounds] == [1] * 14
    assert [round_.num_scheduled for round_ in second.rounds] == [4] * 14
    compare(outputs(done), plain, atol=atol)
    for output, wanted in zip(outputs(spoilt), plain, strict=True):
        assert_differ([output], [wanted], atol=atol)
    assert_nothing_left(first)
    assert_nothing_left(second)
