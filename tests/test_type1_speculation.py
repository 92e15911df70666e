"""type1 with speculative decoding: drafts change what is computed when, and some keep KV of their own in each block."""

from __future__ import annotations

import random

import numpy as np
import pytest

from support import engines
from support.driver import Corrupt, Generate, ResetAll, ResetLocal, Take, drive, type1
from support.llm import Output, compare
from support.models import model_path

pytestmark = pytest.mark.engine

BLOCK = 32
#: Where a hit, or a draft, changes how tokens are split into steps, sums run in another order.
CLOSE = 1e-5


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def speculation(method, draft):
    return {"method": method, "model": model_path(draft), "num_speculative_tokens": 3}


def run(runner, script, **arguments):
    return engines.run(
        drive, runner=runner, timeout=300, model=model_path("llama"), script=script, connector=type1(), **arguments
    )


#: With three letters, texts repeat themselves.
LETTERS = {"allowed_token_ids": [60, 61, 62]}
ASKED = {
    "letters": Generate(
        [[60 + token % 3 for token in prompt(length, length)] for length in (58, 54)], 22, sampling=LETTERS
    ),
    "prompt": Generate([prompt(90, 1)], 12),
    "whole blocks": Generate([prompt(3 * BLOCK, 3)], 16),
}

_plain = []


def run_plain(name):
    """Return what is generated without drafts and without a connector, on the first runner: the second one agrees."""
    if not _plain:
        _plain.append(engines.run(drive, model=model_path("llama"), script=list(ASKED.values())))
    return _plain[0].rounds[list(ASKED).index(name)].outputs


def assert_differ(outputs, expected):
    """The negative control: the comparison that passed must fail here."""
    with pytest.raises(AssertionError, match="request"):
        compare(outputs, expected, atol=CLOSE)


@pytest.mark.parametrize(
    ("runner", "method", "asynchronous"),
    [("v1", "ngram", False), ("v2", "ngram", False), ("v2", "ngram_gpu", True)],
)
def test_ngram(runner, method, asynchronous):
    """Drafts from the text itself, accepted and rejected ones: what decoding stored is right, and hits are, too.

    With asynchronous scheduling vLLM has another way to find them, which on the first runner needs a GPU.
    """
    ask, expected = ASKED["letters"], run_plain("letters")
    # Decoding filled the second block of each. What it did last may not be stored: tokens that a step finds out itself
    # are stored in the next one.
    longer = [[*text, *output.tokens[:19]] for text, output in zip(ask.prompts, expected, strict=True)]
    again = Generate(longer, 3, sampling=LETTERS)
    expected_again = [Output(output.tokens[19:], output.logprobs[19:]) for output in expected]
    result = run(
        runner,
        [ask, ResetLocal(), again, Corrupt(), ResetLocal(), again],
        env={"NUMBA_DISABLE_JIT": "1"},  # compiling the search for drafts takes 6 s, the search itself nothing
        asynchronous=asynchronous,
        speculative_config={"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    )
    cold, warm, spoilt = result.rounds
    assert 0 < cold.drafts["accepted"] < cold.drafts["drafted"]
    compare(cold.outputs, expected, atol=CLOSE)
    compare(warm.outputs, expected_again, atol=CLOSE)
    assert_differ(spoilt.outputs, expected_again)
    assert [r.counts["tokens_loaded"] for r in result.rounds] == [0, 4 * BLOCK, 4 * BLOCK]
    assert not any(result.leftovers.values()), result.leftovers


def numbers_that_differ(one, other):
    """Count, by layer and block, the numbers that differ between what two engines, or rounds, stored under equal keys.

    Adding up in another order makes small differences, which don't count.
    """
    pairs = {
        (layer, key): (one.layer(key, layer).view(np.float32), other.layer(key, layer).view(np.float32))
        for layer in one.layers
        for key in one.blocks
        if key in other.blocks
    }
    return {where: count for where, pair in pairs.items() if (count := int((~np.isclose(*pair, atol=1e-3)).sum()))}


@pytest.mark.parametrize(
    ("method", "draft", "asynchronous"), [("draft_model", "llama_noisy", False), ("eagle", "llama_eagle", True)]
)
def test_e8_what_draft_layers_store(runner, method, draft, asynchronous):
    """E8: draft layers' KV of a block is the same whether drafts led to its tokens or one prefill computed them.

    A draft model's depends on nothing that follows the block, so hits use it to its end. EAGLE's last position depends
    on the next token, which the key doesn't cover: that is why the last block of a hit isn't used there.
    """
    ask, expected = ASKED["prompt"], run_plain("prompt")
    (text,) = ask.prompts
    whole = text + expected[0].tokens[:10]
    other = text[: 2 * BLOCK] + prompt(20, 2)
    script = [ask, Take(), ResetAll(), Generate([whole], 1), Take(), ResetAll(), Generate([other], 1), Take()]
    result = run(runner, script, asynchronous=asynchronous, speculative_config=speculation(method, draft))
    compare(result.rounds[0].outputs, expected, atol=CLOSE)
    decoded, prefilled, elsewhere = result.stored
    drafts = [layer for layer in decoded.layers if layer not in (f"model.layers.{i}.self_attn.attn" for i in range(4))]
    assert len(drafts) == (4 if method == "draft_model" else 1)
    assert len(decoded.blocks) == 3
    assert decoded.blocks.keys() == prefilled.blocks.keys()
    assert numbers_that_differ(decoded, prefilled) == {}
    _, second = (key for key in decoded.blocks if key in elsewhere.blocks)
    differ = numbers_that_differ(decoded, elsewhere)
    if method == "draft_model":
        assert differ == {}
    else:
        one_token = decoded.layers[drafts[0]] // BLOCK // 4  # of four bytes each
        assert differ == {(drafts[0], second): one_token}


def test_a_draft_model_is_right_as_often_warm_as_cold(runner):
    """Drafts from loaded KV are accepted as often as those from computed KV, to the last token of a stored prompt.

    Here with asynchronous scheduling: a step is scheduled before it is known which drafts of the one before were
    accepted. The control spoils only the draft model's layers: outputs stay right, but drafts don't.
    """
    ask, expected = ASKED["whole blocks"], run_plain("whole blocks")
    script = [
        *(ask, ResetLocal(), ask),
        *(Corrupt("draft_model."), ResetLocal(), ask),
        *(Corrupt("model."), ResetLocal(), ask),
    ]
    result = run(runner, script, asynchronous=True, speculative_config=speculation("draft_model", "llama_noisy"))
    cold, warm, drafts_spoilt, spoilt = result.rounds
    for outputs in (cold.outputs, warm.outputs, drafts_spoilt.outputs):
        compare(outputs, expected, atol=CLOSE)
    assert_differ(spoilt.outputs, expected)
    assert [r.counts["tokens_loaded"] for r in result.rounds] == [0, *[3 * BLOCK] * 3]
    assert 0 < cold.drafts["accepted"] < cold.drafts["drafted"]
    assert warm.drafts == cold.drafts
    assert drafts_spoilt.drafts["accepted"] < cold.drafts["accepted"]
    assert not any(result.leftovers.values()), result.leftovers
