"""The two hooks that a connector can implement, as pluggy specifications.

A connector class marks methods with `kvplug.hookimpl`; no base class is needed. At the first step in a worker the
live connector, and each child of a `MultiConnector`, is registered if its class has such methods.

    import kvplug

    class MyConnector(KVConnectorBase_V1):
        @kvplug.hookimpl
        def before_update_states(self, step):
            return {request_id: self.load(request) for request_id, request in step.requests.items()}

Signatures may grow: a new argument is added at the end of a specification, and an implementation names only those
it wants, so old ones keep working.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvplug.step import Step

__all__ = ["HOOK_API", "PROJECT", "HookSpecs", "has_hooks", "hookimpl", "hookspec", "needed_hooks"]

PROJECT = "kvplug"

#: Rises by one with each hook or argument that is added. A distribution that needs a newer one can check it, and
#: require the kvplug release that brought it.
HOOK_API = 1

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a method of a connector class as an implementation of the hook of the same name.
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """Specifications of the worker-side hooks."""

    @hookspec
    def before_update_states(self, step: Step) -> Mapping[str, int] | None:
        """Say how much of this step's work is already done, before the model runner takes in the step.

        Called in each worker, once per scheduler step, before the runner changes its state, zeroes or copies blocks,
        or prepares inputs. What the implementation loads into the blocks of `step.requests` before it returns
        doesn't have to be computed: the runner is handed a step that is shorter by that much.

        The answer is a promise about this worker's paged cache, not a wish: a request's count covers the tokens that
        follow its `num_computed_tokens` without a gap, and every layer. kvplug caps a count so that at least one token
        is left to compute, ignores counts for requests that can't be shortened (`StepRequest.num_skippable_tokens`
        is 0 for those), takes the maximum over plugins and the minimum over tensor-parallel ranks.

        If the connector's metadata has an attribute `candidates` (request ids, made by the scheduler half and so equal
        on all ranks), only those count, and ranks need not talk when it is empty.

        Args:
            step: What the scheduler decided, read-only.

        Returns:
            For each request id the number of tokens, of those scheduled in this step, whose KV is in the
            paged cache now. Requests that aren't named, and None, mean 0.

        Raises:
            Exception: Anything. It is logged with the plugin's name and counted; the step goes on as a miss.

        """

    @hookspec
    def before_blocks_reused(self, step: Step) -> None:
        """Finish reading blocks of preempted requests, before anything can overwrite them.

        Called in each worker at most once per step, and always when `step.preempted` isn't empty, or when another
        connector of the worker implements `before_update_states`: what that loads may go to blocks of requests that
        have ended. Before `before_update_states` of the same step. (Before vLLM 0.25.1 nothing tells of requests that
        `reset_prefix_cache` preempts until they resume.) Whatever still reads blocks that aren't its request's any more
        (an asynchronous save) must be done, or have given up, when this returns.

        Args:
            step: What the scheduler decided, read-only.

        Raises:
            Exception: Anything. It is logged with the plugin's name and counted; the step goes on.

        """


def has_hooks(cls: type) -> frozenset[str]:
    """Return the names of the hooks that a class implements.

    A method marked with `hookimpl` counts under its own name, or under its `specname`. The names aren't checked against
    `HookSpecs`: a misspelt one is returned too.

    Args:
        cls: A connector class.

    """
    return frozenset(name for name, _ in _marked(cls))


def needed_hooks(cls: type) -> frozenset[str]:
    """Return the names of the hooks that a class can't do without.

    That is all that it implements, but for those marked `hookimpl(optionalhook=True)`: such a connector works where
    vLLM's runner doesn't call the hook, too.

    Args:
        cls: A connector class.

    """
    return frozenset(name for name, optional in _marked(cls) if not optional)


def _marked(cls: type) -> Iterator[tuple[str, bool]]:
    for name in dir(cls):
        method = inspect.getattr_static(cls, name, None)
        options = getattr(method, f"{PROJECT}_impl", None) if inspect.isroutine(method) else None
        if options is not None:
            yield options.get("specname") or name, bool(options.get("optionalhook"))
