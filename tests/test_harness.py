"""The harness for tests on real engines does what tests rely on, before any connector is involved."""

from __future__ import annotations

import os
import time

import pytest

from support.engines import JobError
from support.llm import Output, compare, generate, make_llm
from support.servers import ServerError, serve

pytestmark = pytest.mark.engine

PROMPTS = [[(7 * i + 3) % 256 for i in range(100)], [(5 * i + 1) % 256 for i in range(70)]]


def _generate_plainly(model: str) -> list[Output]:
    return generate(make_llm(model), PROMPTS, 12)


def test_both_runners_generate_the_same(zygote, models):
    """A plain engine gives tokens on both runners, the same ones; `make_llm` checks that each is really used."""
    first, second = (zygote(_generate_plainly, runner=runner, model=models("llama")) for runner in ("v1", "v2"))
    assert [len(output.tokens) for output in first] == [12, 12]
    assert all(len(position) >= 5 for output in first for position in output.logprobs)
    compare(second, first, atol=1e-5)


def test_output_depends_on_the_prompt(zygote, models):
    """Two prompts give different outputs, which vary themselves: else equality would say nothing about KV."""
    first, second = zygote(_generate_plainly, model=models("llama"))
    assert first.tokens != second.tokens
    assert len(set(first.tokens)) > 3


def test_equal_runs_are_equal_to_the_bit(zygote, models):
    """Two engines of one kind agree exactly, log-probabilities included: an exact comparison is a fair demand."""
    compare(zygote(_generate_plainly, model=models("llama")), zygote(_generate_plainly, model=models("llama")))


@pytest.mark.parametrize("model", ["mistral_sliding", "gemma3"])
def test_other_models_generate(zygote, models, model):
    """The models for sliding windows and for several KV-cache groups run, and their output depends on the prompt."""
    first, second = zygote(_generate_plainly, model=models(model))
    assert first.tokens != second.tokens


def _generate_with_adapter(model: str, adapter: str | None) -> list[Output]:
    llm = make_llm(model, enable_lora=True, max_lora_rank=8)
    return generate(llm, PROMPTS, 12, lora=None if adapter is None else (1, adapter))


def test_adapters_change_the_output(zygote, models):
    """Each LoRA adapter gives another output than the base model: keys that forget the adapter can be noticed."""
    outputs = [
        zygote(_generate_with_adapter, model=models("llama"), adapter=adapter)
        for adapter in (None, models("lora1"), models("lora2"))
    ]
    assert len({tuple(output[0].tokens) for output in outputs}) == 3


def _generate_speculatively(model: str, draft: str, method: str) -> list[Output]:
    speculation = {"model": draft, "method": method, "num_speculative_tokens": 2}
    return generate(make_llm(model, speculative_config=speculation), PROMPTS, 12)


@pytest.mark.parametrize(("draft", "method"), [("llama_eagle", "eagle"), ("llama_draft", "draft_model")])
def test_speculation_keeps_the_tokens(zygote, models, draft, method):
    """The draft models for llama work, and greedy tokens stay those of the plain engine."""
    plain = zygote(_generate_plainly, model=models("llama"))
    speculative = zygote(_generate_speculatively, model=models("llama"), draft=models(draft), method=method)
    assert [output.tokens for output in speculative] == [output.tokens for output in plain]


def _process_id() -> int:
    return os.getpid()


def _be_killed() -> None:
    os.abort()


def _never_end() -> None:
    time.sleep(60)


def _fail() -> None:
    print("a line of output")
    raise ValueError("this is wrong")


@pytest.mark.parametrize(
    ("function", "message"), [(_be_killed, "SIGABRT"), (_never_end, "killed after 1 s"), (_fail, "this is wrong")]
)
def test_a_failed_job_says_why(zygote, function, message):
    """A job that dies, hangs or raises fails its test with the reason, and the next job runs."""
    with pytest.raises(JobError, match=message):
        zygote(function, timeout=1)
    assert zygote(_process_id) != os.getpid()


def test_a_failed_job_shows_its_output(zygote):
    """The error of a failed job has its traceback and what it printed."""
    with pytest.raises(JobError, match=r"(?s)in _fail.*a line of output"):
        zygote(_fail)


def test_a_server_serves_on_the_second_runner(zygote, models):
    """A multi-process server starts, uses the runner asked for, gives an in-process engine's tokens, has metrics."""
    with serve(models("llama"), runner="v2") as server:
        choice = server.complete(PROMPTS[0], 12, return_token_ids=True)
        assert server.metric("vllm:prompt_tokens_total") == len(PROMPTS[0])
        assert "Using V2 Model Runner" in server.log
    assert choice["token_ids"] == zygote(_generate_plainly, model=models("llama"))[0].tokens


def _altered(outputs: list[Output], *, token: int | None = None, logprob: float = 0.0) -> list[Output]:
    """Return two outputs with another token, or another log-probability, at the third position of the second one."""
    first, second = outputs
    tokens = [token if token is not None and i == 2 else one for i, one in enumerate(second.tokens)]
    changed = {second.tokens[2]: second.logprobs[2][second.tokens[2]] + logprob}
    logprobs = [one | changed if i == 2 else one for i, one in enumerate(second.logprobs)]
    return [first, Output(tokens, logprobs)]


def test_a_comparison_names_what_differs():
    """One other token, or a log-probability beyond the tolerance, fails a comparison and says where."""
    outputs = [Output([1, 2, 3], [{t: -0.5, 9: -2.0} for t in (1, 2, 3)]) for _ in range(2)]
    compare(outputs, outputs)
    compare(_altered(outputs, logprob=1e-6), outputs, atol=1e-5)
    with pytest.raises(AssertionError, match="request 1, output position 2: token 7 instead of 3"):
        compare(_altered(outputs, token=7), outputs)
    for change, tolerance in ((1e-6, 0.0), (1e-4, 1e-5), (float("nan"), 1e-5)):
        with pytest.raises(AssertionError, match="request 1, output position 2: token 3 has log-probability"):
            compare(_altered(outputs, logprob=change), outputs, atol=tolerance)
    for fewer in (outputs[:1], [outputs[0], Output([1, 2], [])], [outputs[0], Output([1, 2, 3], [])]):
        with pytest.raises(AssertionError, match="instead of"):
            compare(fewer, outputs)


def test_a_comparison_lets_the_last_places_vary():
    """Within the tolerance, the least likely of the reported tokens may be another one; exactly, it may not."""
    one, other = [Output([1], [{1: -0.5, 8: -2.000001}])], [Output([1], [{1: -0.5, 9: -2.0}])]
    compare(one, other, atol=1e-5)
    for tolerance in (0.0, 1e-7):
        with pytest.raises(AssertionError, match="token 8 has log-probability"):
            compare(one, other, atol=tolerance)


def test_a_server_that_cannot_start_says_why(models):
    """The error of a server that ends while it starts has its status and its log."""
    with (
        pytest.raises(ServerError, match=r"(?s)ended with status \d+ while starting.*No such file"),
        serve(models("llama"), python="/bin/sh"),
    ):
        pass
