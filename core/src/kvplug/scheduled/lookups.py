"""What is promised to a request that vLLM's scheduler asks about, and what it is made to wait for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug.scheduled.hits import HitFinder
from kvplug.scheduled.tracked import Tracked, Wait

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup
    from kvplug.scheduled.admission import Admission
    from kvplug.scheduled.settings import ScheduledSettings
    from kvplug.stats import Stats
    from kvplug.store.directed import DirectedStore
    from kvplug.store.tiered.loader import Prefetch

__all__ = ["Lookups", "wants_all_computed"]


class Lookups:
    """Answers how much of a request is in host memory, and brings what only L2 has there while the request waits.

    What it answers with is pinned. A request waits within bounds: each until its own deadline, and only so many at a
    time. After that, it is told what there is.

    Args:
        settings: Of the connector.
        groups: The model's KV-cache groups.
        store: The store.
        stats: Counts what happens.
        admission: Says whether one more request may be loaded.
        drop_last_hit: See `HitFinder`.

    """

    def __init__(
        self,
        settings: ScheduledSettings,
        groups: Sequence[KVGroup],
        store: DirectedStore,
        stats: Stats,
        admission: Admission,
        *,
        drop_last_hit: bool,
    ) -> None:
        self._settings = settings
        self._store = store
        self._stats = stats
        self._admission = admission
        self.finder = HitFinder(groups, store, drop_last=drop_last_hit)
        self._asynchronous = not settings.layerwise
        # One token must be left to compute. A synchronous promise leaves it; after an asynchronous one vLLM computes
        # the last token again, which can't be done with recurrent state: that has the token in it already.
        self._left = 0 if self._asynchronous and not any(group.kind == "state" for group in groups) else 1
        # Requests that are held back, and until when.
        self._parked: dict[str, float] = {}

    @property
    def num_parked(self) -> int:
        """Requests that are held back now."""
        self._let_go()
        return len(self._parked)

    def match(self, tracked: Tracked, num_local_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded beyond those that vLLM's own cache has; see `SchedulerHalf.match`.

        Args:
            tracked: The request, with keys up to date.
            num_local_tokens: Tokens in vLLM's own prefix cache.

        """
        assert tracked.keys is not None
        if tracked.hit is None:
            tracked.hit = self.finder.start(num_local_tokens)
        hit, keys = tracked.hit, tracked.keys.by_group
        limit = len(tracked.request.all_token_ids) - self._left
        tokens = self.finder.find(hit, keys, num_local_tokens, limit)
        longest = limit // self.finder.alignment * self.finder.alignment
        if tokens < longest:
            if self._is_coming(tracked, tokens, limit) and self._may_wait(tracked):
                return None, False
            tokens = self.finder.find(hit, keys, num_local_tokens, limit)  # some may have come just now
        if tokens > num_local_tokens and self._asynchronous and not self._admission.allows(tracked.request):
            if self._may_wait(tracked):
                return None, False
            tokens = num_local_tokens
        self._parked.pop(tracked.request_id, None)
        if tokens <= num_local_tokens:
            return 0, False
        return tokens - num_local_tokens, self._asynchronous

    def forget(self, tracked: Tracked) -> None:
        """Give back what a request has pinned, and let it wait no more."""
        self._parked.pop(tracked.request_id, None)
        tracked.wait = None
        if tracked.hit is not None:
            self.finder.release(tracked.hit)
            tracked.hit = None

    def _is_coming(self, tracked: Tracked, tokens: int, limit: int) -> bool:
        """Say whether more will be found soon; the first time, begin to fetch what may be in L2."""
        finder, store, hit, wait = self.finder, self._store, tracked.hit, tracked.wait
        assert hit is not None
        assert tracked.keys is not None
        keys = tracked.keys.by_group
        if wait is None:
            coming = any(store.is_coming(key) for key in finder.missing(hit, keys, limit))
            if not (store.has_l2 or coming) or not self._has_room():
                return False
            wait = tracked.wait = self._new_wait(tokens)
            if store.has_l2:
                wait.prefetches = self._fetch(finder.wanted_first(hit, keys, limit))
            else:
                wait.last_stage = True
        if self._is_fetching(wait):
            return True
        if not wait.last_stage:
            wait.last_stage = True
            wait.then(self._fetch(finder.wanted_then(hit, keys, limit)))
            if self._is_fetching(wait):
                return True
        if wait.tiers:
            hit.scanned = -1  # what has come may make an end possible that wasn't
            finder.find(hit, keys, hit.local, limit)
        return any(store.is_coming(key) for key in finder.missing(hit, keys, limit))

    def _is_fetching(self, wait: Wait) -> bool:
        """Say whether something is on its way from L2. What was too much at a time follows when the rest is there."""
        if not all(prefetch.over for prefetch in wait.prefetches):
            return True
        following = [self._store.go_on(prefetch) for prefetch in wait.prefetches]
        if not any(following):
            return False
        wait.then([prefetch for prefetch in following if prefetch is not None])
        return True

    def _fetch(self, wanted: Sequence[tuple[Sequence[bytes], bool]]) -> list[Prefetch]:
        return [self._store.prefetch(keys, only_last=only_last) for keys, only_last in wanted if keys]

    def _new_wait(self, tokens: int, *, last_stage: bool = False) -> Wait:
        until = time.monotonic() + self._settings.l2_load_timeout
        return Wait(until, last_stage=last_stage, tokens_before=tokens)

    def _has_room(self) -> bool:
        self._let_go()
        return len(self._parked) < self._settings.max_parked_requests

    def _let_go(self) -> None:
        """Forget those whose time is up: vLLM may not have asked again."""
        now = time.monotonic()
        for request_id in [request_id for request_id, until in self._parked.items() if until <= now]:
            del self._parked[request_id]

    def _may_wait(self, tracked: Tracked) -> bool:
        """Say whether a request may be held back once more, and note that it is."""
        wait = tracked.wait
        if wait is not None and time.monotonic() >= wait.until:
            if not wait.timed_out:
                wait.timed_out = True
                self._stats.add("l2_load_timeouts")
            return False
        # It may have been told before what there is, and got no blocks.
        if tracked.request_id not in self._parked and not self._has_room():
            return False
        if wait is None:
            wait = tracked.wait = self._new_wait(tracked.num_local_tokens, last_stage=True)
        self._parked[tracked.request_id] = wait.until
        return True


def wants_all_computed(request: Any) -> bool:
    """Say whether a request needs every position computed. vLLM itself looks at that from 0.31 on."""
    skip = getattr(request, "skip_reading_prefix_cache", None)
    if skip is not None:
        return bool(skip)
    sampling = getattr(request, "sampling_params", None)
    return getattr(request, "pooling_params", None) is not None or (
        sampling is not None and sampling.prompt_logprobs is not None
    )
