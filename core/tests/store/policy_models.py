"""Eviction policies in the plainest way: lists, searched from end to end."""

from __future__ import annotations


class _QueuesModel:
    """Several lists. What is pinned keeps its place until it is first in one."""

    def __init__(self, *names):
        self.queues = {name: [] for name in names}

    def __contains__(self, entry):
        return any(other is entry for queue in self.queues.values() for other in queue)

    def hit(self, entry):
        entry.uses = min(3, entry.uses + 1)

    def pinned(self, entry):
        pass

    def removed(self, entry):
        for name, queue in self.queues.items():
            self.queues[name] = [other for other in queue if other is not entry]

    def has_candidate(self):
        return any(not entry.pins for queue in self.queues.values() for entry in queue)

    def clear(self):
        for queue in self.queues.values():
            queue.clear()


class FIFOModel(_QueuesModel):
    def __init__(self, capacity):
        super().__init__("overdue", "order")

    def added(self, entry):
        self.queues["order"].append(entry)

    def unpinned(self, entry):
        if entry not in self:
            self.queues["overdue"].append(entry)

    def victim(self):
        while self.has_candidate():
            entry = (self.queues["overdue"] or self.queues["order"]).pop(0)
            if not entry.pins:
                return entry
        return None


class LRUModel(FIFOModel):
    """What is used goes to the end of the list, pinned or not."""

    def hit(self, entry):
        self.removed(entry)
        self.queues["order"].append(entry)


class GhostsModel:
    """The last so many that were added, but those whose place a later one has taken."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.places = 1 << (2 * capacity - 1).bit_length()
        self.added = []

    def add(self, item):
        kept = [None if other is not None and (other - item) % self.places == 0 else other for other in self.added]
        self.added = [*kept, item][-self.capacity :]

    def discard(self, item):
        found = item in self.added
        self.added = [None if other == item else other for other in self.added]
        return found


class S3FIFOModel(_QueuesModel):
    def __init__(self, capacity):
        super().__init__("small", "main")
        self.target = max(1, capacity // 10)
        self.ghosts = GhostsModel(max(1, capacity - self.target))
        self.to_spare = 0

    def added(self, entry):
        entry.uses = 0
        entry.in_main = self.ghosts.discard(hash(entry.key))
        self.queues["main" if entry.in_main else "small"].append(entry)

    def unpinned(self, entry):
        if entry not in self:
            entry.in_main = entry.in_main or entry.uses > 0
            self.queues["main" if entry.in_main else "small"].append(entry)

    def victim(self):
        if not self.has_candidate():
            return None
        self.to_spare = min(self.to_spare + 1, 32)
        small, main = self.queues["small"], self.queues["main"]
        queue = small if len(small) >= self.target else main
        while True:
            if not queue:
                queue = main if queue is small else small
            entry = queue.pop(0)
            if entry.pins:
                continue
            if entry.uses and self.to_spare:
                self.to_spare -= 1
                entry.uses = 0 if queue is small else entry.uses - 1
                entry.in_main = True
                main.append(entry)
                continue
            if queue is small:
                self.ghosts.add(hash(entry.key))
            return entry

    def clear(self):
        super().clear()
        self.ghosts.added.clear()
        self.to_spare = 0


POLICY_MODELS = {"fifo": FIFOModel, "lru": LRUModel, "s3fifo": S3FIFOModel}
