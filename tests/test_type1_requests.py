"""type1 with every kind of request: those it leaves alone, several samples of one prompt, grammars, penalties.

One engine per runner serves them all: cold, from L1, and from a spoilt L1.
"""

from __future__ import annotations

import math
import random

import pytest

from support import engines
from support.driver import Corrupt, Generate, ResetLocal, drive, type1
from support.llm import Embedded, compare
from support.models import model_path

pytestmark = pytest.mark.engine

BLOCK = 32
CLOSE = 1e-5


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def letters(length, seed):
    return [97 + token % 3 for token in prompt(length, seed)]


#: What is asked for, by name; no two share a prefix. All but the last have three full blocks a prompt.
ASKED = {
    "prompt_logprobs": Generate([prompt(100, 1)] * 2, 3, each=[{}, {"prompt_logprobs": 2}]),
    "embeddings": Generate([Embedded(prompt(110, 2)), prompt(110, 2)], 3),
    "samples": Generate([prompt(120, 3)], 4, sampling={"n": 3, "temperature": 1.0, "seed": 5}),
    "grammars": Generate(
        [prompt(101, 4), prompt(102, 5)],
        6,
        each=[
            {"structured_outputs": {"regex": "[a-h]{4}[0-9]{8}"}},
            {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}},
        ],
    ),
    # What is punished is counted over the whole prompt, skipped tokens included.
    "penalties": Generate(
        [letters(100, 6)], 6, sampling={"repetition_penalty": 1.5, "presence_penalty": 0.4, "min_tokens": 4}
    ),
}

_results = {}


def run(runner, script, connector=None):
    key = runner, repr(script), connector is None
    if key not in _results:
        _results[key] = engines.run(
            drive,
            runner=runner,
            timeout=300,
            model=model_path("llama"),
            script=script,
            connector=connector,
            enable_prompt_embeds=True,
        )
    return _results[key]


def plain_outputs(name, runner="v1"):
    """Return what an engine without a connector answers: on the first runner, with which the second one agrees."""
    if runner == "v1":
        return run(runner, list(ASKED.values())).rounds[list(ASKED).index(name)].outputs
    return run(runner, [ASKED[name]]).rounds[0].outputs


def served(runner, name):
    """Return what type1's engine did for one of `ASKED`: cold, warm, and from a spoilt L1."""
    every = list(ASKED.values())
    result = run(runner, [*every, ResetLocal(), *every, Corrupt(), ResetLocal(), *every], type1())
    assert not any(result.leftovers.values()), result.leftovers
    return result.rounds[list(ASKED).index(name) :: len(ASKED)]


def assert_differ(outputs, expected):
    """The negative control: the comparison that passed must fail here."""
    with pytest.raises(AssertionError, match="request"):
        compare(outputs, expected, atol=CLOSE)


def loaded(rounds):
    return [r.counts["tokens_loaded"] for r in rounds]


def saved(rounds):
    return [r.counts["blocks_saved"] for r in rounds]


def test_prompt_logprobs(runner):
    """Log-probabilities of the prompt are full and right: such a request computes everything.

    Beside it in the step, the same prompt without them is loaded, and that one alone notices a spoilt L1.
    """
    cold, warm, spoilt = rounds = served(runner, "prompt_logprobs")
    expected = plain_outputs("prompt_logprobs")
    assert [len(output.prompt_logprobs) for output in expected] == [0, 100]
    assert all(len(position) >= 2 for position in expected[1].prompt_logprobs[1:])
    compare(cold.outputs, expected, atol=CLOSE)
    compare(warm.outputs, expected, atol=CLOSE)
    compare(spoilt.outputs[1:], expected[1:], atol=CLOSE)
    assert_differ(spoilt.outputs[:1], expected[:1])
    assert loaded(rounds) == [0, 3 * BLOCK, 3 * BLOCK]
    assert saved(rounds) == [3, 0, 0]


def test_prompt_embeddings(runner):
    """A prompt given as embeddings is neither stored nor reused, though the same tokens are, beside it in the step."""
    cold, warm, spoilt = rounds = served(runner, "embeddings")
    expected = plain_outputs("embeddings")
    compare(expected[:1], expected[1:], atol=CLOSE)  # it's the same prompt
    compare(cold.outputs, expected, atol=CLOSE)
    compare(warm.outputs, expected, atol=CLOSE)
    compare(spoilt.outputs[:1], expected[:1], atol=CLOSE)
    assert_differ(spoilt.outputs[1:], expected[1:])
    assert loaded(rounds) == [0, 3 * BLOCK, 3 * BLOCK]
    assert saved(rounds) == [3, 0, 0]


def test_several_samples_of_a_prompt(runner):
    """With n > 1, samples with the same seed are the same, cold and warm. One loads, the others share its blocks.

    The runners draw random numbers in different ways, so each is compared with itself.
    """
    cold, warm, spoilt = rounds = served(runner, "samples")
    expected = plain_outputs("samples", runner)
    assert len({tuple(output.tokens) for output in expected}) == 3
    compare(cold.outputs, expected, atol=CLOSE)
    compare(warm.outputs, expected, atol=CLOSE)
    assert_differ(spoilt.outputs, expected)
    assert loaded(rounds) == [0, 3 * BLOCK, 3 * BLOCK]


def test_structured_output(runner):
    """Requests with a regular expression and with a JSON schema: grammars follow the tokens, whatever was skipped."""
    cold, warm, spoilt = rounds = served(runner, "grammars")
    expected = plain_outputs("grammars")
    assert -math.inf in expected[1].logprobs[0].values()  # it forbids what the model would say
    compare(cold.outputs, expected, atol=CLOSE)
    compare(warm.outputs, expected, atol=CLOSE)
    assert_differ(spoilt.outputs, expected)
    assert loaded(rounds) == [0, 6 * BLOCK, 6 * BLOCK]


def test_penalties(runner):
    """Penalties for tokens that were there before count those of the prompt that were skipped."""
    cold, warm, spoilt = rounds = served(runner, "penalties")
    expected = plain_outputs("penalties")
    compare(cold.outputs, expected, atol=CLOSE)
    compare(warm.outputs, expected, atol=CLOSE)
    assert_differ(spoilt.outputs, expected)
    assert loaded(rounds) == [0, 3 * BLOCK, 3 * BLOCK]
