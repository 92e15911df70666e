"""Scheduler half of pd_reuse: what a request's parameters change in what is stored, waited for and answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvplug import compat
from kvplug.log import RateLimited, get_logger
from kvplug.scheduled.lookups import num_loadable
from kvplug.scheduled.scheduler import SchedulerHalf
from kvplug_pd_reuse import params

if TYPE_CHECKING:
    from kvplug.scheduled.metadata import SlabHandshake
    from kvplug.scheduled.tracked import Tracked
    from kvplug_pd_reuse.settings import PDReuseSettings

__all__ = ["PDReuseScheduler"]

_limited = RateLimited(get_logger(__name__))

#: What is wrong with a prefill engine, by `params.Handover.problem`.
_PROBLEMS = {
    "namespace": "another model or cache",
    "version": "another version of kvplug",
    "layout": "parallel sizes that aren't this engine's own, and aren't named in peer_layouts",
}
#: More tokens than any prompt has.
_ALL = 1 << 62


class PDReuseScheduler(SchedulerHalf):
    """Answers vLLM's scheduler, as `SchedulerHalf`, and hands prompts over.

    An engine has no role: each request says whether it is prefilled for another engine or was prefilled by one, and
    all others are like type2's.

    Args:
        settings: Of pd_reuse.
        namespace: Fingerprint that every key starts from (32 bytes).
        engine_id: vLLM's name for this engine.
        layout: Its tensor- and pipeline-parallel size.
        arguments: Of `SchedulerHalf`.

    """

    tails: ClassVar[bool] = True
    # A decode engine waits for what is stored.
    writes_at_once: ClassVar[bool] = True

    def __init__(
        self,
        settings: PDReuseSettings,
        *,
        namespace: bytes,
        engine_id: str = "",
        layout: tuple[int, int] = (1, 1),
        **arguments: Any,
    ) -> None:
        super().__init__(settings, namespace=namespace, **arguments)
        self._namespace = namespace
        self._engine_id = engine_id
        self._layout = layout
        self._layouts = {layout, *settings.peers}
        self._has_state = any(group.kind == "state" for group in self.groups)
        self._handover_timeout = settings.handover_timeout
        self._handovers: dict[str, params.Handover] = {}
        # Those from other engines that have no blocks yet.
        self._uncounted: set[str] = set()
        # Those whose last prompt token was dropped.
        self._shortened: set[str] = set()
        #: Fewer tokens than this aren't worth loading.
        self.min_reuse_tokens = settings.min_reuse_tokens or 1
        self._measures = settings.min_reuse_tokens is None

    # -- A request's start -------------------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """Take in a request that vLLM has just been given, before anything else is done with it.

        Args:
            request: vLLM's `Request`.

        """
        if params.is_deep(request.kv_transfer_params):
            _limited.warning("deep", "A request's kv_transfer_params aren't read: they are nested too deeply.")
            compat.forget_transfer_params(request)
        # The decode engine computes the last token, and recurrent state must not have it in it already.
        is_prefill = params.read(request.kv_transfer_params, self._namespace).role == "prefill"
        if is_prefill and self._has_state and compat.drop_last_prompt_token(request):
            self._shortened.add(request.request_id)

    def prepare(self, tracked: Tracked) -> None:
        """Take in what a request's parameters say."""
        request = tracked.request
        handover = params.read(request.kv_transfer_params, self._namespace, self._layouts)
        if handover.role is None:
            return
        self._handovers[tracked.request_id] = handover
        # A prefill engine waits for what is on its way from the store, too: it may be most of a long prompt.
        tracked.patience = self._handover_timeout
        if handover.role == "prefill":
            dropped = request.request_id in self._shortened
            number = request.num_prompt_tokens + dropped
            tracked.save_tail_at = num_loadable(number, self.groups, asynchronous=True)
            return
        self._uncounted.add(tracked.request_id)
        if handover.problem:
            self.stats.add(f"handovers_refused:{handover.problem}")
            _limited.warning(
                handover.problem,
                "A request comes from a prefill engine with %s: what the store has for this engine is used, "
                "and the rest is computed.",
                _PROBLEMS[handover.problem],
            )
        else:
            tracked.num_expected_tokens = _ALL if handover.num_tokens is None else handover.num_tokens

    # -- Lookups -----------------------------------------------------------------------------------------------------

    def match(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded, as `SchedulerHalf.match`; 0 if these are too few to be worth it."""
        if len(request.all_token_ids) - num_local_tokens < self.min_reuse_tokens:
            tracked = self._track(request)
            tracked.num_local_tokens = num_local_tokens
            return (None if self._has_to_be_passed_over(tracked) else 0), False
        tokens, is_asynchronous = super().match(request, num_local_tokens)
        if tokens is not None and tokens < self.min_reuse_tokens:
            return 0, False
        return tokens, is_asynchronous

    def admit(self, request: Any, block_ids: Sequence[list[int]], num_external_tokens: int) -> None:
        """Take in that vLLM has given a request its blocks, as `SchedulerHalf.admit`, and count a hand-over."""
        tracked = self._track(request)
        if tracked.request_id in self._uncounted:
            self._uncounted.remove(tracked.request_id)  # vLLM admits it again when all is loaded
            self._count_handover(tracked, num_external_tokens)
        super().admit(request, block_ids, num_external_tokens)
        if tracked.save_tail_at and not tracked.assured and self._slots is not None and self._has_keys(tracked):
            assert tracked.keys is not None
            tracked.assured = True
            for keys in tracked.keys.by_group:
                self.store.assure(keys)

    def _count_handover(self, tracked: Tracked, num_external_tokens: int) -> None:
        there = tracked.num_local_tokens + num_external_tokens
        # vLLM computes the last token again if all are there.
        self.stats.add("handover_tokens_computed", max(1, tracked.request.num_prompt_tokens - there))
        self.stats.add("handovers")
        if (wait := tracked.wait) is not None:
            self.stats.observe("handover_wait_seconds", time.monotonic() - wait.started)
            if wait.timed_out:
                self.stats.add("handover_timeouts")

    # -- A request's end ---------------------------------------------------------------------------------------------

    def _forget(self, tracked: Tracked) -> None:
        self._handovers.pop(tracked.request_id, None)
        self._uncounted.discard(tracked.request_id)
        self._shortened.discard(tracked.request_id)
        super()._forget(tracked)

    def answer(self, tracked: Tracked) -> dict[str, Any] | None:
        """Return what a decode engine is to be told of a prompt that this one has prefilled."""
        handover = self._handovers.get(tracked.request_id)
        if handover is None or handover.role != "prefill" or not compat.has_answer(tracked.request):
            return None
        return params.answer(
            tracked.request,
            self._namespace,
            engine_id=self._engine_id,
            layout=self._layout,
            num_stored_tokens=self._num_stored_tokens(tracked),
        )

    def _num_stored_tokens(self, tracked: Tracked) -> int:
        """Return how many tokens from the start a decode engine may wait for."""
        if tracked.keys is None or self._slots is None or not self.store.has_l2:
            return 0
        return tracked.save_tail_at if tracked.tail_saved else 0

    # -- Workers -----------------------------------------------------------------------------------------------------

    def set_slab(self, slab: SlabHandshake) -> None:
        """Take in what the workers have for slots, and have measured."""
        super().set_slab(slab)
        if self._measures:
            self.min_reuse_tokens = max(1, slab.min_reuse_tokens)
