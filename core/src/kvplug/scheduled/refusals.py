"""What a connector that decides on the scheduler can't work with, said at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug import compat
from kvplug.errors import UnsupportedError

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup
    from kvplug.scheduled.settings import ScheduledSettings

__all__ = ["refuse_what_cannot_work"]


def refuse_what_cannot_work(
    vllm_config: Any,
    role: Any,
    groups: Sequence[KVGroup],
    *,
    settings: ScheduledSettings,
    name: str,
    roles: Sequence[str] = ("kv_both",),
) -> None:
    """Raise if this vLLM, model or parallelism can't work with the connector.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        role: vLLM's `KVConnectorRole`.
        groups: The model's KV-cache groups.
        settings: Of the connector.
        name: The connector's name, for messages.
        roles: What `kv_role` may be.

    Raises:
        UnsupportedError: One sentence that says what, and what to do.

    """
    compat.check_vllm_version()
    if compat.worker_metadata_class() is None:
        raise UnsupportedError(
            f"{name} needs vLLM 0.18.1 or newer, where workers can tell the scheduler what became of a transfer, and "
            f"this is {compat.vllm_version()}: update vLLM, or use Type1Connector."
        )
    role_in_transfer = vllm_config.kv_transfer_config.kv_role
    if role_in_transfer not in roles:
        raise UnsupportedError(f"{name} both saves and loads: set kv_role to kv_both instead of {role_in_transfer}.")
    if split := [kind for kind in compat.split_dimensions(vllm_config) if "context" in kind]:
        raise UnsupportedError(
            f"{name} can't store blocks whose tokens are spread over ranks, as under {' and '.join(split)}: leave that "
            "out, or the connector."
        )
    _refuse_groups(vllm_config, groups, settings, name)
    runner_class = compat.model_runner_in_use(vllm_config) if getattr(role, "name", "") == "WORKER" else None
    if runner_class is not None and not compat.reports_to_scheduler(runner_class):
        raise UnsupportedError(
            f"{name} needs a model runner that passes on what workers tell the scheduler, and vLLM's second one does "
            "so from 0.20.2 on: set VLLM_USE_V2_MODEL_RUNNER=0, or update vLLM."
        )
    if settings.layerwise and not compat.load_failures_are_fatal(vllm_config):
        is_v2 = runner_class is not None and compat.runner_kind(runner_class) == "v2"
        if is_v2 or getattr(vllm_config.scheduler_config, "async_scheduling", False):
            # vLLM takes the request back in its scheduler, but not the step that is in flight, or what the second
            # runner counts by itself: the request would go on with KV that was never loaded.
            raise UnsupportedError(
                f"{name} can't have failed loads recomputed layer by layer with asynchronous scheduling or on vLLM's "
                "second model runner, which would go on with wrong KV: set transfer to between_steps, or leave "
                'kv_load_failure_policy at "fail".'
            )
    graphs = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    if settings.layerwise and graphs is not None and graphs.has_full_cudagraphs():
        raise UnsupportedError(
            f"{name} can't load and save layer by layer where CUDA graphs contain whole steps: set transfer to "
            "between_steps, or the compilation's cudagraph_mode to PIECEWISE."
        )


def _refuse_groups(vllm_config: Any, groups: Sequence[KVGroup], settings: ScheduledSettings, name: str) -> None:
    if [group.kind for group in groups] != ["full"]:
        what = f"{name} supports models with more than full attention (this one has {_kinds(groups)})"
        if not compat.reports_failed_loads():
            raise UnsupportedError(
                f"{what} from vLLM 0.30 on, where a failed load of theirs can be reported: update vLLM, or leave out "
                "--no-disable-hybrid-kv-cache-manager."
            )
        if settings.layerwise:
            raise UnsupportedError(f"{what} only if they aren't loaded layer by layer: set transfer to between_steps.")
    if not any(group.kind == "state" for group in groups):
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            f"{name} reuses recurrent state only where vLLM keeps it at the ends of blocks: switch prefix caching on "
            "(--enable-prefix-caching), or serve this model without the connector."
        )
    if vllm_config.speculative_config is not None:
        raise UnsupportedError(
            f"{name} can't tell which blocks hold recurrent state under speculative decoding: leave that out, or the "
            "connector."
        )


def _kinds(groups: Sequence[KVGroup]) -> str:
    words = {"full": "full attention", "window": "a sliding window", "chunk": "chunked attention", "state": "state"}
    return ", ".join(words[group.kind] for group in groups)
