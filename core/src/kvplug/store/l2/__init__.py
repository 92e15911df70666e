"""L2: values by key, beyond one worker's memory.

- `tier` is what a tier has to do; the tiers are packages beside it, and `registry` finds them and other people's.
- `client` runs one tier's calls for one slab: on threads, with deadlines, behind a circuit breaker (`breaker`).
- `value` says what a stored block looks like, `keys` what it is called, `codecs` how it can be made smaller.
"""

from __future__ import annotations

from kvplug.store.l2.tier import Tier, TierError, TierTimeoutError, Usage

__all__ = ["Tier", "TierError", "TierTimeoutError", "Usage"]
