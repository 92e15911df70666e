"""Finding, and pinning, the longest prefix of a request that is in L1 in all KV-cache groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvplug.kv_groups import KVGroup, alignment_of

if TYPE_CHECKING:
    from kvplug.request_keys import Tail
    from kvplug.store import SlotRef
    from kvplug.store.directed import DirectedStore

__all__ = ["Hit", "HitFinder"]

Keys = Sequence[Sequence[bytes]]


@dataclass
class Hit:
    """What is pinned for one request that waits."""

    #: Tokens that vLLM's own prefix cache had, when it was last looked for.
    local: int = 0
    #: Tokens from the start that are covered if a hit was found, by vLLM's cache and by pinned blocks; else 0.
    tokens: int = 0
    #: By group: the first block that is pinned, and the slots from there on, without gaps.
    first: list[int] = field(default_factory=list)
    refs: list[list[SlotRef]] = field(default_factory=list)
    #: Up to where ends of hits have been tried; -1 to try again.
    scanned: int = -1

    def slot(self, group: int, block: int) -> SlotRef | None:
        """Return where a request's block is, by its position in the request; None if it isn't pinned."""
        index = block - self.first[group]
        refs = self.refs[group]
        return refs[index] if 0 <= index < len(refs) else None


class HitFinder:
    """Looks for hits.

    A hit ends where blocks of all groups end, or where a prompt ends whose last blocks are stored as far as they are
    full (its tail). Up to there, full attention needs all blocks, a sliding window those in
    the window, and recurrent state the one block that holds it. So full attention leads: it decides how far a hit can
    go, and the others are tried from there downwards.

    Args:
        groups: The model's KV-cache groups.
        store: The store.
        drop_last: Whether the last block of a hit isn't used, since draft layers' KV at its end depends on a token
            that its key doesn't cover.

    """

    def __init__(self, groups: Sequence[KVGroup], store: DirectedStore, *, drop_last: bool) -> None:
        self._groups = tuple(groups)
        self._leaders = [group for group in groups if group.kind == "full"]
        self._followers = [group for group in groups if group.kind != "full"]
        self._store = store
        self._dropped = alignment_of(self._groups) if drop_last else 0
        self.alignment = alignment_of(self._groups)

    def start(self, local: int) -> Hit:
        """Return a hit in which nothing is pinned.

        Args:
            local: Tokens that vLLM's own prefix cache has.

        """
        hit = Hit()
        self._restart(hit, local)
        return hit

    def _restart(self, hit: Hit, local: int) -> None:
        self.release(hit)
        hit.local, hit.tokens = local, 0
        hit.first = [local // group.block_size for group in self._groups]
        hit.refs = [[] for _ in self._groups]
        hit.scanned = -1

    def find(self, hit: Hit, keys: Keys, local: int, limit: int, tail: Tail | None = None) -> int:
        """Extend a hit as far as it goes now. It can be asked again and again; what is pinned is looked up once.

        Args:
            hit: The request's hit.
            keys: The request's keys, by group.
            local: Tokens that vLLM's own prefix cache has now: may be more or less than before.
            limit: Tokens that may be covered at most.
            tail: Where the tokens up to `limit` end, if a hit may end there, too.

        Returns:
            Tokens from the start that are covered; at most `local` if that is all.

        """
        if local < hit.local:
            if self._lengthen(hit, keys, local):
                hit.scanned = -1  # ends that were no gain are one now
            else:
                self._restart(hit, local)
        elif local > hit.local and self._is_behind(hit, local):
            self._restart(hit, local)
        hit.local = local
        end = self.reach(hit, keys, limit)
        if tail is not None and max(hit.tokens, local) < tail.tokens and self._pin_tail(hit, keys, tail):
            hit.tokens = tail.tokens
        if end > hit.scanned:
            for tokens in range(end, max(hit.tokens, local), -self.alignment):
                if self._pin_followers(hit, keys, tokens):
                    hit.tokens = tokens
                    break
            hit.scanned = end
        return max(hit.tokens, local)

    def reach(self, hit: Hit, keys: Keys, limit: int) -> int:
        """Pin what leading groups have, and return the tokens up to which a hit can go."""
        covered = limit
        for group in self._leaders:
            number = group.index
            refs, last = hit.refs[number], limit // group.block_size
            have = hit.first[number] + len(refs)
            # One key tells whether there is more; long prompts are asked for often.
            if have < last and (more := self._store.pin_prefix((keys[number][have],))):
                refs += more
                refs += self._store.pin_prefix(keys[number][have + 1 : last])
            covered = min(covered, (hit.first[number] + len(refs)) * group.block_size)
        return max(0, covered // self.alignment * self.alignment - self._dropped)

    def missing(self, hit: Hit, keys: Keys, limit: int, tail: Tail | None = None) -> Iterator[bytes]:
        """Yield the keys that a longer hit would need first."""
        end = limit // self.alignment * self.alignment
        for group in self._leaders:
            have = hit.first[group.index] + len(hit.refs[group.index])
            if have < limit // group.block_size:
                yield keys[group.index][have]
            elif have == limit // group.block_size:
                yield from _key_of(tail, group)
            end = min(end, have * group.block_size // self.alignment * self.alignment)
        if end > max(hit.tokens, hit.local):
            for group in self._followers:
                yield keys[group.index][end // group.block_size - 1]
        if tail is not None and hit.tokens < tail.tokens:
            for group in self._followers:
                yield from _key_of(tail, group)

    def wanted_first(
        self, hit: Hit, keys: Keys, limit: int, tail: Tail | None = None
    ) -> list[tuple[Sequence[bytes], bool]]:
        """Return what to fetch from L2 first: runs of keys of those groups that decide how far a hit goes."""
        groups = self._leaders or [group for group in self._followers if group.kind != "state"]
        wanted: list[tuple[Sequence[bytes], bool]] = []
        for group in groups:
            have = hit.first[group.index] + len(hit.refs[group.index])
            wanted.append(([*keys[group.index][have : limit // group.block_size], *_key_of(tail, group)], False))
        return wanted

    def wanted_then(
        self, hit: Hit, keys: Keys, limit: int, tail: Tail | None = None
    ) -> list[tuple[Sequence[bytes], bool]]:
        """Return what to fetch from L2 next, given what leading groups have: keys, and whether the last one will do."""
        end = self.reach(hit, keys, limit)
        if tail is not None and self._leads_to(hit, tail):
            end = tail.tokens
        else:
            tail = None
        wanted: list[tuple[Sequence[bytes], bool]] = []
        for group in self._followers if end > hit.local else ():
            stop = end // group.block_size
            if group.kind == "state":
                wanted.append(([*keys[group.index][hit.local // group.block_size : stop], *_key_of(tail, group)], True))
            elif self._leaders:
                first = max(group.first_needed(end), hit.local // group.block_size)
                wanted.append(([*keys[group.index][first:stop], *_key_of(tail, group)], False))
        return wanted

    def release(self, hit: Hit) -> None:
        """Unpin everything. The hit is of no use after that."""
        for refs in hit.refs:
            if refs:
                self._store.unpin(refs)
                refs.clear()

    def take(self, hit: Hit) -> list[SlotRef]:
        """Return all that is pinned, for somebody else to unpin. The hit is of no use after that."""
        taken = [ref for refs in hit.refs for ref in refs]
        hit.refs = [[] for _ in hit.refs]
        return taken

    def _leads_to(self, hit: Hit, tail: Tail) -> bool:
        """Say whether leading groups have all blocks up to a tail, and pin the last ones."""
        for group in self._leaders:
            blocks = hit.first[group.index] + len(hit.refs[group.index])
            missing = -(-tail.tokens // group.block_size) - blocks
            if missing > 1 or (missing == 1 and not (more := self._store.pin_prefix(_key_of(tail, group)))):
                return False
            if missing == 1:
                hit.refs[group.index] += more
        return True

    def _pin_tail(self, hit: Hit, keys: Keys, tail: Tail) -> bool:
        # It is tried at every step of a request that waits: first what can be told by one look.
        has = self._store.allocator.prefix_length
        here = all(has(_key_of(tail, group)) == len(_key_of(tail, group)) for group in self._followers)
        return here and self._leads_to(hit, tail) and self._pin_followers(hit, keys, tail.tokens, tail)

    def _pin_followers(self, hit: Hit, keys: Keys, tokens: int, tail: Tail | None = None) -> bool:
        pinned: list[tuple[int, int, list[SlotRef]]] = []
        for group in self._followers:
            first = max(group.first_needed(tokens), hit.local // group.block_size)
            wanted = [*keys[group.index][first : tokens // group.block_size], *_key_of(tail, group)]
            refs = self._store.pin_prefix(wanted)
            pinned.append((group.index, first, refs))
            if len(refs) < len(wanted):
                for _, _, some in pinned:
                    self._store.unpin(some)
                return False
        for number, first, refs in pinned:
            self._store.unpin(hit.refs[number])
            hit.first[number], hit.refs[number] = first, refs
        return True

    def _is_behind(self, hit: Hit, local: int) -> bool:
        """Say whether vLLM's own cache has come to have more than what is pinned."""
        return hit.tokens < local and all(
            (hit.first[group.index] + len(hit.refs[group.index])) * group.block_size < local for group in self._leaders
        )

    def _lengthen(self, hit: Hit, keys: Keys, local: int) -> bool:
        """Pin the blocks before those that are pinned: vLLM's own cache has lost some. False if one is missing."""
        for group in self._groups:
            number = group.index
            first = local // group.block_size
            if group.kind != "full":
                if not hit.tokens:
                    hit.first[number] = first
                    continue
                first = max(group.first_needed(hit.tokens), first)
            wanted = keys[number][first : hit.first[number]]
            refs = self._store.pin_prefix(wanted)
            hit.refs[number] = refs + hit.refs[number]
            if len(refs) < len(wanted):
                # Not without gaps any more: the caller releases all of it.
                return False
            hit.first[number] = min(first, hit.first[number])
        return True


def _key_of(tail: Tail | None, group: KVGroup) -> tuple[bytes, ...]:
    """Return the key of a group's block that a tail doesn't fill, if there is one."""
    key = None if tail is None else tail.keys[group.index]
    return () if key is None else (key,)
