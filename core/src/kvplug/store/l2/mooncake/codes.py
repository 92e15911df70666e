"""What the numbers mean that Mooncake's client answers with: at least 0 is good, below it are errors."""

from __future__ import annotations

__all__ = ["GONE", "IN_USE", "KEPT", "MISSING", "NO_SPACE", "REFUSED", "TIMED_OUT", "is_unanswered", "name_of"]

#: No node has room, and nothing may be evicted.
NO_SPACE = -200
#: From a read: the value doesn't fit its buffer.
TOO_LONG = -600
#: From a write: another client is writing the same key.
OTHER_WRITER = -601
#: Another client is still writing it.
NOT_READY = -703
MISSING = -704
EXISTS = -705
#: Somebody read it or asked for it a moment ago, so it stays for a while.
LEASED = -706
#: A read took longer than the lease: what came may be another value's bytes.
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
#: The master can't be reached.
UNREACHABLE = -900
#: The master doesn't answer.
TIMED_OUT = -901

#: From a read: the value isn't there, or not yet, or doesn't fit. Nothing is wrong.
GONE = frozenset({TOO_LONG, NOT_READY, MISSING})
#: From a write: there is a value with this key.
KEPT = frozenset({0, EXISTS})
#: From a write: there is no room, or others write or remove the same key meanwhile. Nothing is wrong.
REFUSED = frozenset({NO_SPACE, OTHER_WRITER, NOT_READY, MISSING, LEASED})
#: From a removal: others are at the key, so it stays for a while.
IN_USE = frozenset({NOT_READY, LEASED})

_NAMES = {
    -1: "internal error",
    OTHER_WRITER: "another client writes the key",
    NO_SPACE: "no space",
    TOO_LONG: "invalid parameters",
    NOT_READY: "not ready",
    MISSING: "no such key",
    EXISTS: "the key exists",
    LEASED: "leased",
    LEASE_EXPIRED: "the lease ended before the transfer",
    TRANSFER_FAILED: "the transfer failed",
    UNREACHABLE: "the master can't be reached",
    TIMED_OUT: "the master doesn't answer",
}


def name_of(code: int) -> str:
    """Return a code in words, with its number."""
    return f"{_NAMES.get(code, 'error')} ({code})"


def is_unanswered(code: int) -> bool:
    """Whether the master didn't answer, so that nothing is known of any key."""
    return code in (UNREACHABLE, TIMED_OUT)
