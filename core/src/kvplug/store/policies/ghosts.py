"""What was evicted not long ago, in a bounded number of bytes."""

from __future__ import annotations

from array import array

__all__ = ["GhostQueue"]

#: A number of two halves: the upper one is a fingerprint's, the lower one says when it was added.
_STAMP = (1 << 32) - 1


class GhostQueue:
    """Most of the last so many fingerprints that were added, and a quick way to ask for one.

    16 to 32 bytes per fingerprint, all taken at once. A dict of keys would take ten times as much.

    Each fingerprint has one place in a table, which its low bits choose, and whoever comes later to the same place
    takes it over. The table is at most half full, so about a fifth of them are lost, the older ones mostly. To keep all
    takes a hash table beside a queue, which made evictions slower, and hits hardly more.

    Args:
        capacity: Number of fingerprints remembered, at least 1. With that many later ones, one is forgotten.

    """

    __slots__ = ("_capacity", "_clock", "_mask", "_table")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Empty places read as added long ago.
        self._clock = capacity + 1
        self._table = array("q", [0]) * (1 << (2 * capacity - 1).bit_length())
        self._mask = len(self._table) - 1

    def add(self, fingerprint: int) -> None:
        """Remember a fingerprint: a signed 64-bit number, well mixed in all its bits, such as Python's hash of a key.

        One that is remembered already counts as new.
        """
        clock = self._clock
        self._table[fingerprint & self._mask] = fingerprint & ~_STAMP | clock & _STAMP
        self._clock = clock + 1

    def discard(self, fingerprint: int) -> bool:
        """Forget a fingerprint, and return whether it was remembered."""
        place = fingerprint & self._mask
        found = self._table[place]
        if (found ^ fingerprint) >> 32 or (self._clock - found) & _STAMP > self._capacity:
            return False
        self._table[place] = 0
        return True
