"""What was evicted not long ago, in a bounded number of bytes."""

from __future__ import annotations

from array import array

__all__ = ["GhostQueue"]


class GhostQueue:
    """The last so many fingerprints that were added, and a quick way to ask for one.

    16 to 24 bytes per fingerprint, all taken at once. A dict of keys would take ten times as much.

    Fingerprints are kept in a ring. A hash table with open addressing says where in the ring each one is.

    Args:
        capacity: Number of fingerprints remembered, at least 1. One more, and the oldest is forgotten.

    """

    __slots__ = ("_length", "_mask", "_next", "_ring", "_table")

    def __init__(self, capacity: int) -> None:
        self._ring = array("q", [0]) * capacity
        self._next = 0
        # Position in the ring plus 1; 0 where there is none. At most half full, so that searches are short.
        self._table = array("i", [0]) * (1 << (2 * capacity - 1).bit_length())
        self._mask = len(self._table) - 1
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, fingerprint: int) -> bool:
        return self._table[self._find(fingerprint)] != 0

    def add(self, fingerprint: int) -> None:
        """Remember a fingerprint: a signed 64-bit number, well mixed in its low bits, such as Python's hash of a key.

        One that is remembered already counts as new.
        """
        ring, table, mask = self._ring, self._table, self._mask
        position = self._next
        self._next = stamp = position + 1
        if stamp == len(ring):
            self._next = 0
        # What stood here is the oldest, unless it was discarded, or added again and so is somewhere else.
        entry = ring[position] & mask
        while (other := table[entry]) and other != stamp:
            entry = (entry + 1) & mask
        if other:
            self._vacate(entry)
            self._length -= 1
        entry = fingerprint & mask
        while (other := table[entry]) and ring[other - 1] != fingerprint:
            entry = (entry + 1) & mask
        if not other:
            self._length += 1
        ring[position] = fingerprint
        table[entry] = stamp

    def discard(self, fingerprint: int) -> bool:
        """Forget a fingerprint, and return whether it was remembered."""
        ring, table, mask = self._ring, self._table, self._mask
        entry = fingerprint & mask
        while position := table[entry]:
            if ring[position - 1] == fingerprint:
                self._vacate(entry)
                self._length -= 1
                return True
            entry = (entry + 1) & mask
        return False

    def _find(self, fingerprint: int) -> int:
        """Return where in the table a fingerprint is, or else, where it belongs."""
        ring, table, mask = self._ring, self._table, self._mask
        entry = fingerprint & mask
        while (position := table[entry]) and ring[position - 1] != fingerprint:
            entry = (entry + 1) & mask
        return entry

    def _vacate(self, hole: int) -> None:
        """Empty an entry of the table, and close up what was put behind it because it was taken."""
        ring, table, mask = self._ring, self._table, self._mask
        entry = hole
        while position := table[entry := (entry + 1) & mask]:
            home = ring[position - 1] & mask
            # It may move to the hole if it doesn't get before its home: if that is at least as far back as the hole.
            if (entry - home) & mask >= (entry - hole) & mask:
                table[hole] = position
                hole = entry
        table[hole] = 0
