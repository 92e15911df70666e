"""type2 with what vLLM does to be faster: drafts from the text itself, and compiled models."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import engines
from support.driver import Corrupt, Generate, ResetLocal, drive, type2
from support.llm import Output, compare
from support.models import model_path
from support.reuse import CLOSE, assert_differ, assert_nothing_left, loaded, prompt

pytestmark = pytest.mark.engine

BLOCK = 32
#: With three letters, texts repeat themselves.
LETTERS = {"allowed_token_ids": [60, 61, 62]}


@pytest.mark.parametrize(("runner", "method", "asynchronous"), [("v1", "ngram", False), ("v2", "ngram_gpu", True)])
def test_ngram(runner, method, asynchronous):
    """Accepted and rejected drafts: what decoding stored is right, and hits are, too.

    With asynchronous scheduling vLLM has another way to find drafts, which on the first runner needs a GPU.
    """
    texts = [[60 + token % 3 for token in prompt(length, length)] for length in (58, 54)]
    ask = Generate(texts, 22, sampling=LETTERS)
    (plain,) = engines.run(drive, timeout=120, model=model_path("llama"), script=[ask]).rounds
    # Decoding filled the second block of each.
    again = Generate(
        [[*text, *o.tokens[:19]] for text, o in zip(texts, plain.outputs, strict=True)], 3, sampling=LETTERS
    )
    rest = [Output(output.tokens[19:], output.logprobs[19:]) for output in plain.outputs]
    ours = engines.run(
        drive,
        runner=runner,
        timeout=120,
        env={"NUMBA_DISABLE_JIT": "1"},  # compiling the search for drafts takes 6 s, the search itself nothing
        model=model_path("llama"),
        script=[ask, ResetLocal(), again, Corrupt(), ResetLocal(), again],
        connector=type2(),
        asynchronous=asynchronous,
        speculative_config={"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    )
    cold, warm, spoilt = ours.rounds
    assert 0 < cold.drafts["accepted"] < cold.drafts["drafted"]
    compare(cold.outputs, plain.outputs, atol=CLOSE)
    compare(warm.outputs, rest, atol=CLOSE)
    assert_differ(spoilt.outputs, rest)
    assert loaded(ours.rounds) == [0, 4, 4]
    assert_nothing_left(ours)


def compiled(**arguments):
    """Run a script on an engine that compiles its model, and return how many models were compiled, too."""
    from vllm.compilation.counter import compilation_counter

    return drive(enforce_eager=False, **arguments), compilation_counter.num_models_seen


def test_compiled_model():
    """With torch.compile, as vLLM does by default, hits equal what the same engine computes.

    On the first runner only: with the second one's interpreted kernels, the compiler finds no Triton.
    """
    build = Path(__file__).resolve().parents[1] / "build"
    ask = Generate([prompt(150, 1), prompt(97, 2)], 8)
    ours, num_models = engines.run(
        compiled,
        timeout=300,
        env={"TORCHDYNAMO_DISABLE": None, "TORCHINDUCTOR_CACHE_DIR": str(build / "inductor-cache")},
        model=model_path("llama_draft"),  # two layers: the time grows with them
        script=[ask, ResetLocal(), ask, Corrupt(), ResetLocal(), ask],
        connector=type2(),
    )
    assert num_models == 1
    cold, warm, spoilt = ours.rounds
    compare(warm.outputs, cold.outputs, atol=CLOSE)
    assert_differ(spoilt.outputs, cold.outputs)
    assert loaded(ours.rounds) == [0, 7, 7]
    assert_nothing_left(ours)
