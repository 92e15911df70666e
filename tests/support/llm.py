"""In-process vLLM engines in a job: making one, generating greedily, looking inside, comparing outputs.

For use inside a function that `support.engines.run` runs. vLLM is imported inside functions, so that test modules can
import this one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm import LLM


@dataclass(frozen=True)
class Output:
    """What a model generated for one prompt.

    Attributes:
        tokens: The generated token ids.
        logprobs: For each generated token, log-probabilities by token id: of the likeliest ones and the chosen one.
        prompt_logprobs: The same for each token of the prompt, none for its first; empty if they weren't asked for.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)

    def first(self, count: int) -> Output:
        """Return the output as it would be if it had ended after `count` tokens."""
        return Output(self.tokens[:count], self.logprobs[:count], self.prompt_logprobs)


@dataclass(frozen=True)
class Embedded:
    """A prompt that is given as the embeddings of its tokens; the engine needs ``enable_prompt_embeds=True``."""

    tokens: Sequence[int]


def make_llm(
    model: str,
    *,
    connector: Mapping[str, Any] | None = None,
    block_size: int = 32,
    num_gpu_blocks: int = 256,
    max_model_len: int = 1024,
    max_num_batched_tokens: int = 1024,
    max_num_seqs: int = 16,
    enable_prefix_caching: bool = True,
    **engine_args: Any,
) -> LLM:
    """Start an eager float32 engine in this process, on the model runner that the job was started for.

    With ``tensor_parallel_size=2`` the scheduler is in this process and the workers are in processes of their own.

    Args:
        model: Folder of the model.
        connector: vLLM's ``kv_transfer_config``; None for an engine without a connector.
        block_size: Tokens per KV-cache block; a multiple of 32 on a CPU.
        num_gpu_blocks: Blocks in vLLM's own KV cache. A small number forces evictions and preemptions.
        max_model_len: Tokens of prompt and output together.
        max_num_batched_tokens: Tokens in one step; less than a prompt means chunked prefill.
        max_num_seqs: Requests in one step.
        enable_prefix_caching: Whether vLLM reuses blocks in its own KV cache.
        **engine_args: Any other of vLLM's engine arguments.
    """
    from vllm import LLM

    if connector is not None:
        engine_args["kv_transfer_config"] = dict(connector)
    llm = LLM(
        model,
        **{"dtype": "float32", "seed": 0, "enforce_eager": True} | engine_args,
        block_size=block_size,
        num_gpu_blocks_override=num_gpu_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
    )
    asked = "v2" if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1" else "v1"
    if runner_kind(llm) != asked:
        raise AssertionError(f"the engine runs on model runner {runner_kind(llm)}, not on {asked}")
    return llm


def generate(
    llm: LLM,
    prompts: Sequence[Sequence[int] | Embedded],
    max_tokens: int = 16,
    *,
    logprobs: int = 5,
    lora: tuple[int, str] | None = None,
    salt: str | None = None,
    each: Sequence[Mapping[str, Any]] | None = None,
    **sampling: Any,
) -> list[Output]:
    """Generate greedily for all prompts at once, always `max_tokens` tokens each.

    Args:
        llm: The engine.
        prompts: Token ids of each prompt, or its embeddings.
        max_tokens: Tokens to generate per prompt.
        logprobs: How many of the likeliest tokens to report per position.
        lora: Number and folder of a LoRA adapter to use for all prompts.
        salt: vLLM's ``cache_salt`` for all prompts.
        each: What `sampling` is for each prompt alone; wins over that.
        **sampling: Further arguments of vLLM's ``SamplingParams``. ``structured_outputs`` may be a dict.

    Returns:
        One output per prompt, in the order of the prompts; `n` of them where that is more than 1.
    """
    from vllm.lora.request import LoRARequest

    common = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, "logprobs": logprobs} | sampling
    parameters = [_sampling_parameters(common | dict(own)) for own in each or [{} for _ in prompts]]
    inputs = [_to_input(llm, prompt) for prompt in prompts]
    if salt is not None:
        for one in inputs:
            one["cache_salt"] = salt
    adapter = None if lora is None else LoRARequest(f"lora{lora[0]}", lora[0], lora[1])
    answers = llm.generate(inputs, parameters, lora_request=adapter, use_tqdm=False)
    return [
        replace(to_output(completion), prompt_logprobs=_to_logprobs(answer.prompt_logprobs))
        for answer in answers
        for completion in answer.outputs
    ]


def _sampling_parameters(arguments: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammar = arguments.get("structured_outputs")
    if isinstance(grammar, dict):
        arguments = {**arguments, "structured_outputs": StructuredOutputsParams(**grammar)}
    return SamplingParams(**arguments)


def _to_input(llm: LLM, prompt: Sequence[int] | Embedded) -> Any:
    import torch
    from vllm.inputs import EmbedsPrompt, TokensPrompt

    if isinstance(prompt, Embedded):
        return EmbedsPrompt(prompt_embeds=model_runner(llm).model.embed_input_ids(torch.tensor(prompt.tokens)))
    return TokensPrompt(prompt_token_ids=list(prompt))


def to_output(completion: Any) -> Output:
    """Return what matters of one of vLLM's `CompletionOutput`s."""
    return Output(list(completion.token_ids), _to_logprobs(completion.logprobs))


def _to_logprobs(positions: Sequence[Mapping[int, Any] | None] | None) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in (position or {}).items()} for position in positions or []]


def compare(actual: Sequence[Output], expected: Sequence[Output], *, atol: float = 0.0) -> None:
    """Demand equal tokens, and log-probabilities that differ by at most `atol`.

    With a tolerance, the last places among the likeliest tokens may go to different tokens: a token that only one
    side reports must be within `atol` of the least likely token that the other side reports.

    Raises:
        AssertionError: names the first request and position that differ.
    """
    if len(actual) != len(expected):
        raise AssertionError(f"{len(actual)} outputs instead of {len(expected)}")
    for request, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if len(one.tokens) != len(other.tokens):
            raise AssertionError(f"request {request}: {len(one.tokens)} tokens instead of {len(other.tokens)}")
        if len(one.logprobs) != len(other.logprobs):
            raise AssertionError(
                f"request {request}: log-probabilities for {len(one.logprobs)} tokens instead of {len(other.logprobs)}"
            )
        if len(one.prompt_logprobs) != len(other.prompt_logprobs):
            raise AssertionError(
                f"request {request}: log-probabilities for {len(one.prompt_logprobs)} tokens of the prompt instead of "
                f"{len(other.prompt_logprobs)}"
            )
        for position, (here, there) in enumerate(zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)):
            _compare_logprobs(here, there, atol, f"request {request}, prompt position {position}")
        for position, (token, wanted) in enumerate(zip(one.tokens, other.tokens, strict=True)):
            where = f"request {request}, output position {position}"
            if token != wanted:
                raise AssertionError(f"{where}: token {token} instead of {wanted}")
            if one.logprobs:
                _compare_logprobs(one.logprobs[position], other.logprobs[position], atol, where)


def _compare_logprobs(one: Mapping[int, float], other: Mapping[int, float], atol: float, where: str) -> None:
    for token in sorted(one.keys() | other.keys()):
        left = one[token] if token in one else min(one.values())
        right = other[token] if token in other else min(other.values())
        # An exact comparison takes no substitutes; and a NaN differs from everything.
        comparable = (token in one and token in other) or atol > 0
        if not (comparable and (left == right or abs(left - right) <= atol)):  # a grammar's are minus infinity
            raise AssertionError(
                f"{where}: token {token} has log-probability {one.get(token)} instead of {other.get(token)} "
                f"(tolerance {atol})"
            )


def reset_local_cache(llm: LLM) -> None:
    """Empty vLLM's own prefix cache, and leave what the connector holds: the next hit is the connector's."""
    finish_steps(llm)
    if not llm.reset_prefix_cache():
        raise AssertionError("vLLM did not reset its prefix cache: are requests still running?")


def finish_steps(llm: LLM) -> None:
    """Let steps end that are under way for requests that are gone: asynchronous scheduling leaves some."""
    while _engine_core(llm).batch_queue:
        llm.llm_engine.step()


def settle(llm: LLM) -> None:
    """Take steps without requests until nothing is under way any more: a server does so by itself."""
    core = _engine_core(llm)
    while core.scheduler.has_requests() or core.batch_queue:
        core.step_fn()


def connector(llm: LLM) -> Any:
    """Return the live worker-side connector of the engine, whose worker is in this process."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    if not hasattr(llm, "llm_engine"):
        raise TypeError(f"{llm!r} is not an engine")
    return kv_transfer_state.get_kv_transfer_group()


def scheduler(llm: LLM) -> Any:
    """Return the live scheduler; its `connector` is the scheduler-side connector."""
    return _engine_core(llm).scheduler


def model_runner(llm: LLM) -> Any:
    """Return the live model runner of the engine, whose worker is in this process."""
    return _engine_core(llm).model_executor.driver_worker.worker.model_runner


def runner_kind(llm: LLM) -> str:
    """Return which of vLLM's model runners all workers really use, ``v1`` or ``v2``: falling back only logs a line."""
    modules = set(llm.collective_rpc(_runner_module))
    kinds = {"vllm.v1.worker.cpu_model_runner": "v1", "vllm.v1.worker.cpu.model_runner": "v2"}
    if len(modules) != 1:
        raise AssertionError(f"workers of one engine use different model runners: {sorted(modules)}")
    return kinds[modules.pop()]


def _runner_module(worker: Any) -> str:
    return type(worker.model_runner).__module__


def _engine_core(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core
