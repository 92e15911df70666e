"""A live connector of a release: its own MultiConnector, with a child that has both hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kvplug
from kvplug import compat, dispatch
from matrixlib.standins import World

__all__ = ["OWN", "Live", "live"]

_KV_TRANSFER = "vllm.distributed.kv_transfer"
_STATE = f"{_KV_TRANSFER}.kv_transfer_state"
_INTERFACE = f"{_KV_TRANSFER}.kv_connector.v1"
_BASE = f"{_INTERFACE}.base"
_MULTI = f"{_INTERFACE}.multi_connector"

#: Modules that are executed.
OWN = (_KV_TRANSFER, _STATE, _INTERFACE, _BASE, _MULTI)


class Live:
    """What becomes of the child's hooks."""

    def __init__(self, world: World, log: list[str]) -> None:
        self._world = world
        self.log = log
        #: What the next call of the hook returns.
        self.loaded: dict[str, int] = {}
        #: What each call of a hook has seen.
        self.saw: list[dict[str, Any]] = []

    def metadata(self) -> Any:
        """Return a step's metadata; that of the child is `"ours"`."""
        return self._world.module(_MULTI).MultiKVConnectorMetadata(metadata=("theirs", "ours"))

    def errors(self) -> int:
        """Return how many hooks raised since the last time."""
        dispatcher = dispatch.current_dispatcher()
        return 0 if dispatcher is None else int(dispatcher.stats.take().get("plugin_errors", 0))


@contextmanager
def live(world: World, log: list[str]) -> Iterator[Live]:
    """Let the connector be the one of this process, on the only rank there is."""
    calls = Live(world, log)
    state = world.module(_STATE)
    before = compat._transfer_state, dispatch._current, compat.tensor_parallel_ranks  # noqa: SLF001
    compat._transfer_state, dispatch._current = state, None  # noqa: SLF001
    compat.tensor_parallel_ranks = lambda: (0,)
    state._KV_CONNECTOR_AGENT = _connector(world, calls)  # noqa: SLF001
    try:
        yield calls
    finally:
        compat._transfer_state, dispatch._current, compat.tensor_parallel_ranks = before  # noqa: SLF001


def _connector(world: World, calls: Live) -> Any:
    base, multi = world.module(_BASE).KVConnectorBase_V1, world.module(_MULTI).MultiConnector
    methods = dict.fromkeys(base.__abstractmethods__, lambda *_args, **_kwargs: None)
    plain: Any = type("Plain", (base,), methods)

    class Hooked(plain):  # type: ignore[misc]
        @kvplug.hookimpl
        def before_blocks_reused(self, step: kvplug.Step) -> None:
            calls.log.append("before_blocks_reused")
            calls.saw.append(_seen(step))

        @kvplug.hookimpl
        def before_update_states(self, step: kvplug.Step) -> dict[str, int]:
            calls.log.append("before_update_states")
            calls.saw.append(_seen(step))
            return dict(calls.loaded)

    class MultiConnector(multi):  # type: ignore[misc, valid-type]
        def handle_preemptions(self, argument: Any) -> None:
            calls.log.append("vLLM's own call")
            super().handle_preemptions(argument)

    connector: Any = object.__new__(MultiConnector)
    connector._connectors = [object.__new__(plain), object.__new__(Hooked)]  # noqa: SLF001
    return connector


def _seen(step: kvplug.Step) -> dict[str, Any]:
    """Read everything, while that is allowed."""
    return {
        "requests": {
            name: (
                request.num_computed_tokens,
                request.num_scheduled_tokens,
                request.num_draft_tokens,
                request.is_new,
                request.is_resumed,
                request.num_skippable_tokens,
                request.block_ids,
            )
            for name, request in step.requests.items()
        },
        "new": set(step.new),
        "resumed": set(step.resumed),
        "preempted": set(step.preempted),
        "finished": set(step.finished),
        "num_scheduled_tokens": step.num_scheduled_tokens,
        "metadata": step.metadata,
    }
