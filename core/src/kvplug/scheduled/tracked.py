"""What the scheduler half remembers of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplug.request_keys import RequestKeys, Tail
    from kvplug.saves import SaveProgress
    from kvplug.scheduled.hits import Hit
    from kvplug.store.tiered.loader import Prefetch

__all__ = ["Tracked", "Wait"]


@dataclass
class Wait:
    """What a request waits for before it is told what there is."""

    #: When it doesn't wait any longer, by `time.monotonic`.
    until: float
    #: Those that aren't known to be over.
    prefetches: list[Prefetch] = field(default_factory=list)
    #: Tiers from which something has come by those before.
    earlier_tiers: frozenset[str] = frozenset()
    #: Whether it is known already what else to fetch.
    last_stage: bool = False
    #: Tokens that L1 or vLLM's cache had before.
    tokens_before: int = 0
    #: Whether its time was up once.
    timed_out: bool = False
    #: When it began, by `time.monotonic`.
    started: float = 0.0
    #: When the last block came, and how many were pinned then.
    progressed: float = 0.0
    num_seen: int = 0
    #: When to look again for what another engine is storing, and the seconds until the time after that.
    ask_at: float = 0.0
    interval: float = 0.0
    #: Blocks that were pinned when it was looked for last.
    num_pinned: int = 0

    @property
    def tiers(self) -> frozenset[str]:
        """Names of the tiers from which something has come."""
        return self.earlier_tiers.union(*(prefetch.tiers for prefetch in self.prefetches))

    def then(self, prefetches: list[Prefetch]) -> None:
        """Wait for these now."""
        self.earlier_tiers, self.prefetches = self.tiers, prefetches


@dataclass
class Tracked:
    """A request that the scheduler has looked at and that hasn't finished."""

    request: Any
    #: None if its KV must not be stored or reused.
    keys: RequestKeys | None
    progress: SaveProgress
    #: What is pinned for it while it waits.
    hit: Hit | None = None
    #: Set from the first time that it was held back until it is admitted.
    wait: Wait | None = None
    #: Tokens that vLLM's own cache had when it was last looked up, and those promised beyond.
    num_local_tokens: int = 0
    num_promised_tokens: int = 0
    #: Of the latter, those that came from L2 while it waited, and the tiers that they came from.
    num_fetched_tokens: int = 0
    fetched_from: frozenset[str] = frozenset()
    #: Whether a load failed, so that nothing is promised any more.
    failed: bool = False
    #: Where its tokens end, if that is looked for (see `Lookups`).
    tail: Tail | None = None
    #: Seconds that it waits for the next block while more is on its way, or is being stored by another engine; and how
    #: many tokens from the start another engine is storing.
    patience: float = 0.0
    num_expected_tokens: int = 0
    #: Tokens at whose end blocks are saved that aren't full, once; 0 for none.
    save_tail_at: int = 0
    tail_saved: bool = False
    #: Whether tiers were asked whether they still have what is theirs of it.
    assured: bool = False

    @property
    def request_id(self) -> str:
        """The request's id."""
        return str(self.request.request_id)
