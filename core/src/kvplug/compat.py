"""Everything that depends on a vLLM version or on one of its two model runners.

vLLM promises none of the objects that a connector meets (`SchedulerOutput`, the runners, the connector registry). What
kvplug knows of them is here and nowhere else, so that a new release is checked, and mended, in one place. Nothing in
this module imports vLLM until a function needs it.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import compress, repeat
from operator import add, ge
from types import ModuleType
from typing import Any

from kvplug.errors import UnsupportedError
from kvplug.hookspecs import needed_hooks
from kvplug.log import get_logger
from kvplug.manager import check_hooks

__all__ = [
    "HOOK_FUNCTION",
    "NEWEST_KNOWN_VLLM",
    "OLDEST_VLLM",
    "RUNNER_CLASS",
    "RUNNER_MODULES",
    "cache_hit_sources",
    "cached_requests",
    "check_vllm_version",
    "connector_members",
    "has_scheduler_side_loads",
    "hook_delivery",
    "live_connector",
    "load_failures_are_fatal",
    "may_have_scheduler_side_loads",
    "metadata_of",
    "model_runner_in_use",
    "new_blocks",
    "overwrites_before_connectors",
    "overwrites_blocks",
    "overwritten_blocks",
    "preempted_ids",
    "refuse_split_dimensions",
    "replaced_tables",
    "reports_failed_loads",
    "reports_to_scheduler",
    "requests_that_reach",
    "require_hook_support",
    "reserves_blocks_of_loads",
    "resumed_ids",
    "returns_routed_experts",
    "runner_kind",
    "scheduled_requests",
    "set_device_computed_tokens",
    "shortened_output",
    "split_dimensions",
    "static_vetoes",
    "tensor_parallel_rank",
    "tensor_parallel_ranks",
    "transfer_results",
    "two_engines",
    "vllm_version",
    "worker_metadata_class",
]

logger = get_logger(__name__)

#: Oldest release whose connector interface and runners this code base knows.
OLDEST_VLLM = (0, 14)
#: Newest release that was read for this module. Newer ones are judged by what they contain.
NEWEST_KNOWN_VLLM = (0, 33)

#: The model runners that have an anchor for the hook, by the name used in messages and reports.
RUNNER_MODULES = {
    "v1": "vllm.v1.worker.gpu_model_runner",
    "v2": "vllm.v1.worker.gpu.model_runner",
}
RUNNER_CLASS = "GPUModelRunner"
#: Name of the function that the patch calls in `execute_model`.
HOOK_FUNCTION = "before_update_states"

#: More tokens than any request has.
_NEVER = sys.maxsize


# -- vLLM itself ---------------------------------------------------------------------------------------------------


def vllm_version() -> str:
    """Return the version of the vLLM that this process imports."""
    import vllm

    return str(vllm.__version__)


def parse_version(version: str) -> tuple[int, int] | None:
    """Return (major, minor) of a vLLM version, or None for a build that doesn't tell (`dev`, `0.1.dev…`)."""
    parts = version.split("+", maxsplit=1)[0].split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()) or "dev" in version:  # noqa: PLR2004
        return None
    return int(parts[0]), int(parts[1])


def check_vllm_version(version: str | None = None) -> str | None:
    """Refuse a vLLM that is too old.

    Args:
        version: vLLM's version; by default that of the one this process imports.

    Returns:
        A sentence if the version is newer than what was tested or can't be told, else None.

    Raises:
        UnsupportedError: vLLM is older than `OLDEST_VLLM`.

    """
    version = vllm_version() if version is None else version
    parsed = parse_version(version)
    if parsed is None:
        return f"vLLM {version} doesn't say which release it is; kvplug judges it by what it contains."
    if parsed < OLDEST_VLLM:
        raise UnsupportedError(
            f"vLLM {version} is too old for kvplug: install vLLM {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} or newer."
        )
    if parsed > NEWEST_KNOWN_VLLM:
        return (
            f"vLLM {version} is newer than the releases kvplug knows (up to "
            f"{NEWEST_KNOWN_VLLM[0]}.{NEWEST_KNOWN_VLLM[1]}); kvplug judges it by what it contains."
        )
    return None


# -- The live connector ---------------------------------------------------------------------------------------------

_transfer_state: ModuleType | None = None


def live_connector() -> Any:
    """Return this worker's connector, or None if there is none or vLLM has switched it off for a dummy run."""
    global _transfer_state  # noqa: PLW0603 - resolved once, read at every step
    if _transfer_state is None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        _transfer_state = kv_transfer_state
    return _transfer_state._KV_CONNECTOR_AGENT  # noqa: SLF001


def connector_members(connector: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield a connector and, depth first, the children of a `MultiConnector`, each with its path of child indices.

    `MultiConnector` forwards no method that it doesn't know, so kvplug has to reach the children itself.
    """
    yield connector, ()
    if type(connector).__name__ != "MultiConnector":
        return
    for index, child in enumerate(connector._connectors):  # noqa: SLF001
        for member, path in connector_members(child):
            yield member, (index, *path)


def metadata_of(scheduler_output: Any, path: tuple[int, ...]) -> Any:
    """Return the step's connector metadata for the connector at a path of `connector_members`, or None."""
    metadata = scheduler_output.kv_connector_metadata
    for index in path:
        if metadata is None:
            return None
        metadata = metadata.metadata[index]
    return metadata


def worker_metadata_class() -> type | None:
    """Return vLLM's base class of what a worker's connector tells the scheduler's; None before 0.18.1."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return getattr(base, "KVConnectorWorkerMetadata", None)


def reports_to_scheduler(runner_class: type) -> bool:
    """Return whether vLLM passes what a worker's connector tells on to the scheduler's.

    From 0.18.1 on with the first model runner, from 0.20.2 on with the second.

    Args:
        runner_class: The model runner's class.

    """
    if worker_metadata_class() is None:
        return False
    if runner_kind(runner_class) != "v2":
        return True
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    return any(
        "build_connector_worker_meta" in method.__code__.co_names
        for method in vars(ActiveKVConnector).values()
        if inspect.isfunction(method)
    )


# -- The scheduler's output ------------------------------------------------------------------------------------------


def preempted_ids(scheduler_output: Any) -> Collection[str]:
    """Return the ids of requests that were preempted since the last step.

    vLLM says None for none, and before 0.25.1 leaves out those that `reset_prefix_cache` preempts; these come back as
    resumed requests.
    """
    return scheduler_output.preempted_req_ids or ()


def resumed_ids(cached: Any) -> Collection[str]:
    """Return the ids, among the cached requests of a step, whose block ids are new ones, not further ones."""
    return cached.resumed_req_ids  # type: ignore[no-any-return]


def cached_requests(scheduler_output: Any) -> Iterable[tuple[str, tuple[list[int], ...] | None, int]]:
    """Iterate over (request id, new block ids per group or None, computed tokens) of requests scheduled before."""
    cached = scheduler_output.scheduled_cached_reqs
    return zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)


def new_blocks(scheduler_output: Any) -> list[tuple[str, tuple[list[int], ...] | None]]:
    """Return (request id, new block ids per group) of requests scheduled before that have got blocks, or resume.

    In most steps few have, of hundreds.
    """
    cached = scheduler_output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    pairs = zip(cached.req_ids, cached.new_block_ids, strict=True)
    if not resumed:
        return [pair for pair in pairs if pair[1] is not None]
    return [pair for pair in pairs if pair[1] is not None or pair[0] in resumed]


def scheduled_requests(scheduler_output: Any) -> list[tuple[str, int, int]]:
    """Return (request id, computed tokens, scheduled tokens) of a step's requests, new ones first."""
    scheduled = scheduler_output.num_scheduled_tokens
    new = [(new.req_id, new.num_computed_tokens, scheduled[new.req_id]) for new in scheduler_output.scheduled_new_reqs]
    cached = scheduler_output.scheduled_cached_reqs
    # There may be hundreds of these, in every step.
    pairs = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return new + [(request_id, computed, scheduled[request_id]) for request_id, computed in pairs]


def requests_that_reach(scheduler_output: Any, goals: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return those of `scheduled_requests` that have as many tokens as their goal when the step ends.

    In most steps few do, of hundreds.

    Args:
        scheduler_output: vLLM's `SchedulerOutput`.
        goals: Tokens, by request id. Requests without a goal are left out.

    """
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    reaching = [
        (new.req_id, new.num_computed_tokens, scheduled[new.req_id])
        for new in scheduler_output.scheduled_new_reqs
        if new.num_computed_tokens + scheduled[new.req_id] >= goals.get(new.req_id, _NEVER)
    ]
    # By `map`: a loop over hundreds of requests would take more than twice as long.
    ids, computed = cached.req_ids, cached.num_computed_tokens
    ends = map(add, computed, map(scheduled.__getitem__, ids))
    reached = map(ge, ends, map(goals.get, ids, repeat(_NEVER)))
    pairs = compress(zip(ids, computed, strict=True), reached)
    return reaching + [(request_id, before, scheduled[request_id]) for request_id, before in pairs]


def replaced_tables(scheduler_output: Any) -> Mapping[str, tuple[list[int], ...]]:
    """Return complete block tables of requests that replace what is known of them (HiSparse in 0.30 and 0.31)."""
    return getattr(scheduler_output, "block_table_updates", None) or {}


def static_vetoes(new_requests: Iterable[Any]) -> dict[str, str]:
    """Return the requests that must never be shortened, with the reason.

    Args:
        new_requests: vLLM's `NewRequestData`.

    """
    vetoes = {}
    for request in new_requests:
        sampling = request.sampling_params
        if sampling is not None and sampling.prompt_logprobs is not None:
            reason = "prompt_logprobs"  # a skipped position has no hidden state to take them from
        elif request.pooling_params is not None:
            reason = "pooling"  # pools over all positions
        elif request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            reason = "prompt_embeds"
        elif getattr(request, "replay_start", 0):
            reason = "window_replay"  # 0.31 on: the runner recomputes a window on purpose
        else:
            continue
        vetoes[request.req_id] = reason
    return vetoes


def has_scheduler_side_loads(scheduler_output: Any) -> bool:
    """Return whether some request of this step has tokens that a connector promised to the scheduler.

    Known from 0.29 on (`has_sync_kv_loads`); before that the answer is False.
    """
    return bool(getattr(scheduler_output, "has_sync_kv_loads", False))


def may_have_scheduler_side_loads(scheduler_output: Any) -> bool:
    """Like `has_scheduler_side_loads`, but True where vLLM doesn't tell (before 0.29)."""
    return bool(getattr(scheduler_output, "has_sync_kv_loads", True))


def overwrites_blocks(scheduler_output: Any) -> bool:
    """Return whether the runner will zero blocks, or copy blocks over others, before it computes this step."""
    return bool(
        getattr(scheduler_output, "new_block_ids_to_zero", None)  # 0.17.1 on
        or getattr(scheduler_output, "kv_cache_block_copies", None)  # 0.26 on
    )


def overwritten_blocks(scheduler_output: Any) -> Iterator[int]:
    """Yield the ids of the blocks that the runner will zero, or copy others over, before it computes this step.

    They may be in no request's block table.
    """
    yield from getattr(scheduler_output, "new_block_ids_to_zero", None) or ()
    for copied in getattr(scheduler_output, "kv_cache_block_copies", None) or ():
        yield copied.dst_block_id


def _copy_of(instance: Any) -> Any:
    """Return a shallow copy, like `copy.copy`, which takes several times as long.

    There may be as many requests to change in a step as fit into it.
    """
    try:
        values = instance.__dict__
    except AttributeError:  # it has slots
        return copy.copy(instance)
    result = object.__new__(type(instance))
    result.__dict__ = values.copy()
    return result


def _later(new_request: Any, count: int) -> Any:
    later = _copy_of(new_request)
    later.num_computed_tokens += count
    return later


def shortened_output(scheduler_output: Any, skipped: dict[str, int], loaded_blocks: frozenset[int]) -> Any:
    """Return a copy of the scheduler's output in which requests start later.

    The argument isn't changed: executors in the scheduler's process hand over its own object, and later bookkeeping
    reads it.

    Args:
        scheduler_output: vLLM's `SchedulerOutput`.
        skipped: Tokens, of those scheduled, that each request doesn't have to compute: all at least 1 and less
            than scheduled.
        loaded_blocks: Ids of blocks that hold loaded KV and so must not be zeroed or copied over.

    """
    output = _copy_of(scheduler_output)
    output.num_scheduled_tokens = {
        request_id: count - skipped.get(request_id, 0)
        for request_id, count in scheduler_output.num_scheduled_tokens.items()
    }
    output.total_num_scheduled_tokens -= sum(skipped.values())
    output.scheduled_new_reqs = [
        _later(request, count) if (count := skipped.get(request.req_id)) else request
        for request in scheduler_output.scheduled_new_reqs
    ]
    cached = scheduler_output.scheduled_cached_reqs
    if not skipped.keys().isdisjoint(cached.req_ids):
        output.scheduled_cached_reqs = later = _copy_of(cached)
        later.num_computed_tokens = [
            computed + skipped.get(request_id, 0)
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ]
    if zeroed := getattr(scheduler_output, "new_block_ids_to_zero", None):
        output.new_block_ids_to_zero = [block for block in zeroed if block not in loaded_blocks]
    if copies := getattr(scheduler_output, "kv_cache_block_copies", None):
        output.kv_cache_block_copies = [copied for copied in copies if copied.dst_block_id not in loaded_blocks]
    return output


# -- The model runners -----------------------------------------------------------------------------------------------


def runner_kind(runner_class: type) -> str | None:
    """Return `v1` or `v2` for a class that is one of vLLM's model runners or derives from it, else None."""
    modules = {cls.__module__ for cls in runner_class.__mro__ if cls.__name__ == RUNNER_CLASS}
    return next((kind for kind, module in RUNNER_MODULES.items() if module in modules), None)


def set_device_computed_tokens(runner: Any, counts: dict[str, int]) -> None:
    """Bring the second runner's own counts of computed tokens into line with a shortened step.

    Of a request that is already running it takes the scheduler's count, if at all (from 0.22.1 on), into mirrors on the
    host only. Positions and slots come from a tensor on the device, which the runner advances by itself; up to 0.21 it
    advances the mirrors, too. New and resumed requests aren't running: it adds them with the count from the scheduler's
    output.

    Args:
        runner: The live model runner.
        counts: New count of computed tokens by request id.

    """
    if runner_kind(type(runner)) != "v2":
        return
    states = runner.req_states
    for request_id, count in counts.items():
        index = states.req_id_to_index[request_id]
        states.num_computed_tokens.gpu[index] = count
        states.num_computed_prefill_tokens[index] = min(count, int(states.prefill_len.np[index]))
        if hasattr(states, "num_computed_tokens_np"):  # 0.20.2 on
            states.num_computed_tokens_np[index] = count


def model_runner_in_use(vllm_config: Any) -> type | None:
    """Return the class of the model runner that this worker really uses.

    vLLM creates the worker's connector from a method of the worker, which has its runner by then, so the answer is a
    few frames up. Where it isn't (a connector created by hand), it comes from vLLM's configuration and
    from what is imported.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Returns:
        The runner's class, or None if no model runner can be told.

    """
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        owner = frame.f_locals.get("self")
        runner = inspect.getattr_static(owner, "model_runner", None)
        if runner is not None and callable(getattr(type(runner), "execute_model", None)):
            return type(runner)
        frame = frame.f_back  # type: ignore[assignment]
    uses_v2 = getattr(vllm_config, "use_v2_model_runner", None)
    if uses_v2 is None:
        import vllm.envs

        uses_v2 = bool(getattr(vllm.envs, "VLLM_USE_V2_MODEL_RUNNER", False))
    module = sys.modules.get(RUNNER_MODULES["v2" if uses_v2 else "v1"])
    return getattr(module, RUNNER_CLASS, None)


def hook_delivery(runner_class: type) -> str | None:
    """Say how the hook got into a model runner's `execute_model`.

    Looks at the code that will run, not at what was meant to happen to it.

    Args:
        runner_class: One of vLLM's model runners or a subclass.

    Returns:
        `import` if its source was patched as it was imported, `file` if the call is in the file on disk, None if
        `execute_model` doesn't call the hook.

    """
    for cls in runner_class.__mro__:
        method = cls.__dict__.get("execute_model")
        if method is None:
            continue
        code = inspect.unwrap(method).__code__
        if HOOK_FUNCTION in code.co_names:
            module = sys.modules.get(cls.__module__)
            patches = getattr(module, "__kvplug_patches__", ())
            return "import" if any(patch.startswith(HOOK_FUNCTION) for patch in patches) else "file"
        if "execute_model" not in code.co_names:
            return None  # overridden, without a call of what it overrides
    return None


def split_dimensions(vllm_config: Any) -> list[str]:
    """Name the kinds of parallelism, pipeline or context, that spread one request's tokens or layers over ranks."""
    parallel = vllm_config.parallel_config
    sizes = {
        "pipeline": parallel.pipeline_parallel_size,
        "prefill context": getattr(parallel, "prefill_context_parallel_size", 1),
        "decode context": getattr(parallel, "decode_context_parallel_size", 1),
    }
    return [f"{kind} parallelism ({size})" for kind, size in sizes.items() if size > 1]


def refuse_split_dimensions(vllm_config: Any, connector: str) -> None:
    """Refuse a connector that shortens steps where ranks can't agree on that.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        connector: The connector's name, for the message.

    Raises:
        UnsupportedError: There is pipeline or context parallelism.

    """
    if split := split_dimensions(vllm_config):
        raise UnsupportedError(
            f"{connector} decides on the worker how much of a step is left to compute, which ranks can't agree on "
            f"under {' and '.join(split)}: use tensor parallelism, or a connector that decides on the scheduler "
            "(Type2Connector of kvplug-type2)."
        )


def two_engines(connector: str) -> UnsupportedError:
    """Make the error for a second engine in a process, which vLLM gives the first one's connector."""
    return UnsupportedError(
        f"{connector} is used by two engines in one process, which share vLLM's connector: run engine cores in "
        "processes of their own (VLLM_ENABLE_V1_MULTIPROCESSING=1), or shut one down first."
    )


# -- Connectors that decide on the scheduler ---------------------------------------------------------------------------


def has_answer(request: Any) -> bool:
    """Return whether a finished request ended as it should: by its length, or by a stop token or string.

    Args:
        request: vLLM's `Request`.

    """
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def forget_transfer_params(request: Any) -> None:
    """Let a request have no `kv_transfer_params`, as if its client had sent none.

    Args:
        request: vLLM's `Request`, of which nothing has been scheduled.

    """
    request.kv_transfer_params = None
    # What vLLM took them from, and sends to the workers.
    extra = getattr(request.sampling_params, "extra_args", None)
    if extra:
        extra.pop("kv_transfer_params", None)


def drop_last_prompt_token(request: Any) -> bool:
    """Let a request's prompt end one token earlier, if that changes nothing that anybody sees.

    vLLM's own connectors do the same to a prompt with recurrent state whose decode is to be done elsewhere: the one
    token that is generated is not the prompt's continuation then, and whoever asked for one token throws it away.

    Args:
        request: vLLM's `Request`, of which nothing has been scheduled.

    Returns:
        Whether it does.

    """
    tokens = request.prompt_token_ids
    if tokens is None or len(tokens) < 2 or request.max_tokens != 1:  # noqa: PLR2004 - one is left
        return False
    last = len(tokens) - 1
    features = getattr(request, "mm_features", None) or ()
    if any(feature.mm_position.offset + feature.mm_position.length > last for feature in features):
        return False
    sampling = request.sampling_params
    if sampling is None or sampling.prompt_logprobs is not None or getattr(request, "prompt_embeds", None) is not None:
        return False
    del request.prompt_token_ids[-1]
    del request._all_token_ids[-1]  # noqa: SLF001 - the list behind `all_token_ids`
    request.num_prompt_tokens -= 1
    return True


def reports_failed_loads() -> bool:
    """Return whether a connector can report that a request's load failed, whatever its KV-cache groups (0.30 on)."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def transfer_results(finished: set[str], failed: set[str]) -> Any:
    """Make vLLM's `KVConnectorTransferResults` (0.30 on) of the requests whose loads have ended.

    Args:
        finished: Ids of requests whose asynchronous loads have ended.
        failed: Those of them that failed.

    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)


def cache_hit_sources(num_host: int, num_fetched: int, tiers: Collection[str]) -> dict[Any, int]:
    """Say in vLLM's terms where tokens came from (0.32 on).

    Args:
        num_host: Tokens that were in host memory.
        num_fetched: Tokens that were fetched from L2.
        tiers: The tiers that these came from.

    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    # vLLM has a name for disks, and none for stores beyond the machine.
    beyond = CacheHitSource.DISK if set(tiers) == {"disk"} else CacheHitSource.EXTERNAL_UNSPECIFIED
    return {source: count for source, count in ((CacheHitSource.HOST, num_host), (beyond, num_fetched)) if count}


def reserves_blocks_of_loads() -> bool:
    """Return whether vLLM's scheduler sees to it that requests which are loading can all start afterwards."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return hasattr(Scheduler, "_inflight_prefill_reserved_blocks")


def overwrites_before_connectors(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return whether this worker's model runner may zero or copy over blocks before it tells a connector of the step.

    The second one does, where it zeroes or copies at all: for several KV-cache groups, state, or mixed precision.
    """
    runner_class = model_runner_in_use(vllm_config)
    if runner_class is None:
        first = not getattr(vllm_config, "use_v2_model_runner", False)
    else:
        first = runner_kind(runner_class) == "v1"  # of another project's runner nothing is known
    if first:
        return False
    return len(kv_cache_config.kv_cache_groups) > 1 or bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def load_failures_are_fatal(vllm_config: Any) -> bool:
    """Return whether vLLM fails a request whose load failed, instead of computing it (the default from 0.17.1 on)."""
    policy = getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "recompute")
    return bool(policy == "fail")


def returns_routed_experts(vllm_config: Any) -> bool:
    """Return whether vLLM is asked to return what each computed token's experts were."""
    return bool(
        getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False)  # 0.31 on
        or getattr(getattr(vllm_config, "model_config", None), "enable_return_routed_experts", False)  # before
    )


def require_hook_support(vllm_config: Any, role: Any, connector_class: type) -> None:
    """Refuse, when a connector is created, what its hooks can't work with.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        role: vLLM's `KVConnectorRole`.
        connector_class: The connector's class. Nothing is checked if it needs no hook.

    Raises:
        UnsupportedError: A marked method is no hook; vLLM is too old; `before_update_states` with pipeline or context
            parallelism, or where routed experts are to be returned; or, in a worker, the hook isn't live in the model
            runner that is in use.

    """
    hooks = needed_hooks(connector_class)
    if not hooks:
        return
    check_hooks(connector_class)
    name = connector_class.__name__
    if note := check_vllm_version():
        logger.warning("%s", note)
    if "before_update_states" in hooks:
        refuse_split_dimensions(vllm_config, name)
    if "before_update_states" in hooks and returns_routed_experts(vllm_config):
        raise UnsupportedError(
            f"{name} skips tokens, whose routed experts vLLM then can't return: leave out "
            "--enable-return-routed-experts, or the connector."
        )
    if getattr(role, "name", None) != "WORKER":
        return
    runner_class = model_runner_in_use(vllm_config)
    if runner_class is None or runner_kind(runner_class) is None:
        used = "no model runner" if runner_class is None else f"{runner_class.__module__}.{runner_class.__qualname__}"
        raise UnsupportedError(
            f"{name} needs the hook in one of vLLM's own model runners ({', '.join(RUNNER_MODULES.values())}), and "
            f"this worker uses {used}: use a connector that needs no hook (Type2Connector of "
            "kvplug-type2)."
        )
    if hook_delivery(runner_class) is None:
        kind = runner_kind(runner_class) or ""
        raise UnsupportedError(
            f"{name} needs kvplug's hook in {RUNNER_MODULES[kind]}, where it isn't live: {_why_not_live(kind)} "
            "`kvplug doctor` says more."
        )


def _why_not_live(kind: str) -> str:
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "kvplug" not in plugins.split(","):
        return "VLLM_PLUGINS is set and doesn't name kvplug, add it there."
    try:
        import kvplug_hooks
    except ImportError:
        return "install kvplug-hooks."
    status = kvplug_hooks.status().get(f"{HOOK_FUNCTION}.{kind}")
    if status is None or not status.reason:
        return "check that VLLM_PLUGINS, if set, names kvplug."
    return str(status.reason)


# -- Parallel ranks --------------------------------------------------------------------------------------------------


def tensor_parallel_rank() -> int:
    """Return this worker's rank in its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def tensor_parallel_ranks() -> tuple[int, ...]:
    """Return the global ranks of this worker's tensor-parallel group, in order."""
    from vllm.distributed.parallel_state import get_tp_group

    return tuple(get_tp_group().ranks)
