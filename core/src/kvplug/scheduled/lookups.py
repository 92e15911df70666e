"""What is promised to a request that vLLM's scheduler asks about, and what it is made to wait for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug.scheduled.hits import HitFinder
from kvplug.scheduled.tracked import Tracked, Wait

if TYPE_CHECKING:
    from kvplug.kv_groups import KVGroup
    from kvplug.request_keys import Tail
    from kvplug.scheduled.admission import Admission
    from kvplug.scheduled.settings import ScheduledSettings
    from kvplug.stats import Stats
    from kvplug.store.directed import DirectedStore
    from kvplug.store.tiered.loader import Prefetch

__all__ = ["Lookups", "num_loadable", "wants_all_computed"]

#: Seconds between two looks for what another engine is storing: short at first, then longer.
_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.004, 0.05


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
        tails: Whether to look for the end of a prompt, too, that is stored in blocks that aren't full.

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
        tails: bool = False,
    ) -> None:
        self._tails = tails
        self._settings = settings
        self._groups = tuple(groups)
        self._store = store
        self._stats = stats
        self._admission = admission
        self.finder = HitFinder(groups, store, drop_last=drop_last_hit)
        self._asynchronous = not settings.layerwise
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
        limit = num_loadable(len(tracked.request.all_token_ids), self._groups, asynchronous=self._asynchronous)
        tail = tracked.tail = self._tail_of(tracked, limit)
        tokens = self.finder.find(hit, keys, num_local_tokens, limit, tail)
        self._note_progress(tracked)
        longest = limit // self.finder.alignment * self.finder.alignment if tail is None else limit
        if tokens < longest:
            if self._is_coming(tracked, tokens, limit) and self._may_wait(tracked):
                return None, False
            tokens = self.finder.find(hit, keys, num_local_tokens, limit, tail)  # some may have come just now
        if tokens > num_local_tokens and self._asynchronous and not self._admission.allows(tracked.request):
            if self._may_wait(tracked):
                return None, False
            tokens = num_local_tokens
        self._parked.pop(tracked.request_id, None)
        if tokens <= num_local_tokens:
            return 0, False
        return tokens - num_local_tokens, self._asynchronous

    def _tail_of(self, tracked: Tracked, limit: int) -> Tail | None:
        """Return where a request's tokens end, if that may be stored: prompts' ends are, and no others."""
        request, tail = tracked.request, tracked.tail
        if not self._tails or limit < 1 or len(request.all_token_ids) > request.num_prompt_tokens:
            return None
        if tail is None or tail.tokens != limit:
            assert tracked.keys is not None
            tail = tracked.keys.tail(request.all_token_ids, limit)
        return tail

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
        keys, tail = tracked.keys.by_group, tracked.tail
        if wait is None:
            coming = any(store.is_coming(key) for key in finder.missing(hit, keys, limit, tail))
            if not (store.has_l2 or coming) or not self._has_room():
                return False
            wait = tracked.wait = self._new_wait(tracked, tokens)
            if store.has_l2:
                wait.prefetches = self._fetch(finder.wanted_first(hit, keys, limit, tail))
            else:
                wait.last_stage = True
        if self._is_fetching(wait):
            return True
        if not wait.last_stage:
            wait.last_stage = True
            wait.then(self._fetch(finder.wanted_then(hit, keys, limit, tail)))
            if self._is_fetching(wait):
                return True
        if wait.tiers:
            hit.scanned = -1  # what has come may make an end possible that wasn't
            finder.find(hit, keys, hit.local, limit, tail)
        if any(store.is_coming(key) for key in finder.missing(hit, keys, limit, tail)):
            return True
        return self._looks_again(tracked, limit)

    def _looks_again(self, tracked: Tracked, limit: int) -> bool:
        """Say whether to go on waiting for what another engine is storing, and look for it now and then."""
        finder, hit, wait = self.finder, tracked.hit, tracked.wait
        assert hit is not None
        assert wait is not None
        assert tracked.keys is not None
        expected = min(tracked.num_expected_tokens, limit)
        if expected < limit or tracked.tail is None:  # nothing ends within blocks but the whole prompt
            expected = expected // finder.alignment * finder.alignment
        if not tracked.patience or max(hit.tokens, hit.local) >= expected or not self._store.has_l2:
            return False
        now = time.monotonic()
        if now >= wait.progressed + tracked.patience:
            self._time_is_up(wait)
            return False
        pinned = sum(map(len, hit.refs))
        if pinned > wait.num_pinned:
            wait.interval = wait.ask_at = 0.0
        elif now < wait.ask_at:
            return True
        wanted = finder.wanted_first(hit, tracked.keys.by_group, limit, tracked.tail)
        if wait.interval:
            # What comes is found in order, so the first block tells whether there is more.
            wanted = [(keys if only_last else keys[:1], only_last) for keys, only_last in wanted]
        wait.num_pinned = pinned
        wait.interval = min(max(wait.interval * 1.5, _SHORTEST_INTERVAL), _LONGEST_INTERVAL)
        wait.ask_at = now + wait.interval
        wait.then(self._fetch(wanted))
        wait.last_stage = False
        return True

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

    def _new_wait(self, tracked: Tracked, tokens: int, *, last_stage: bool = False) -> Wait:
        now = time.monotonic()
        until = now + max(self._settings.l2_load_timeout, tracked.patience)
        return Wait(until, last_stage=last_stage, tokens_before=tokens, started=now, progressed=now)

    def _has_room(self) -> bool:
        self._let_go()
        return len(self._parked) < self._settings.max_parked_requests

    def _let_go(self) -> None:
        """Forget those whose time is up: vLLM may not have asked again."""
        now = time.monotonic()
        for request_id in [request_id for request_id, until in self._parked.items() if until <= now]:
            del self._parked[request_id]

    @staticmethod
    def _note_progress(tracked: Tracked) -> None:
        """Let a patient request wait on while blocks come: its time counts from the last one."""
        wait, hit = tracked.wait, tracked.hit
        if wait is None or hit is None or not tracked.patience:
            return
        pinned = sum(map(len, hit.refs))
        if pinned > wait.num_seen:
            wait.num_seen, wait.progressed = pinned, time.monotonic()
            wait.until = max(wait.until, wait.progressed + tracked.patience)

    def _time_is_up(self, wait: Wait) -> None:
        if not wait.timed_out:
            wait.timed_out = True
            self._stats.add("l2_load_timeouts")

    def _may_wait(self, tracked: Tracked) -> bool:
        """Say whether a request may be held back once more, and note that it is."""
        wait = tracked.wait
        if wait is not None and time.monotonic() >= wait.until:
            self._time_is_up(wait)
            return False
        # It may have been told before what there is, and got no blocks.
        if tracked.request_id not in self._parked and not self._has_room():
            return False
        if wait is None:
            wait = tracked.wait = self._new_wait(tracked, tracked.num_local_tokens, last_stage=True)
        self._parked[tracked.request_id] = wait.until
        return True


def num_loadable(num_tokens: int, groups: Sequence[KVGroup], *, asynchronous: bool) -> int:
    """Return how many of a request's tokens can be promised at most: all, or all but the last one.

    One token must be left to compute. A synchronous promise leaves it. After an asynchronous one of all tokens, vLLM
    computes the last one again. That can't be done with recurrent state, which has the token in it already; nor where
    the last token needs a block that what comes after it doesn't, since vLLM keeps none for it; nor with a single
    token, for which vLLM would ask again and again.

    Args:
        num_tokens: The request's tokens.
        groups: The model's KV-cache groups.
        asynchronous: Whether the promised tokens are loaded while the request waits.

    """
    last = num_tokens - 1
    every = asynchronous and last > 0
    for group in groups:
        every = every and group.kind != "state" and group.first_needed(num_tokens) == group.first_needed(last)
    return num_tokens if every else last


def wants_all_computed(request: Any) -> bool:
    """Say whether a request needs every position computed. vLLM itself looks at that from 0.31 on."""
    skip = getattr(request, "skip_reading_prefix_cache", None)
    if skip is not None:
        return bool(skip)
    sampling = getattr(request, "sampling_params", None)
    return getattr(request, "pooling_params", None) is not None or (
        sampling is not None and sampling.prompt_logprobs is not None
    )
