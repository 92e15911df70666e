"""The copy path for devices on two simulated streams, whose work runs as early or as late as its order allows."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvplug.paged.layout import fuse, read_layer
from kvplug.paged.staged import StagedCopier
from kvplug.store import Slab

BLOCKS, WIDTH = 8, 64


class Device:
    """Two queues of work. Nothing runs until `run`, and then the eager queue runs as far ahead as events let it."""

    def __init__(self, eager):
        self.queues = {"compute": deque(), "copy": deque()}
        self.eager = eager

    def run(self, until=None):
        """Run everything, or until an event has come."""
        order = sorted(self.queues, key=lambda name: name != self.eager)
        while not (until and until.has_come):
            ready = [name for name in order if self.queues[name] and self._may_run(self.queues[name][0])]
            if not ready:
                assert not any(self.queues.values()), "the streams wait for each other"
                return
            work = self.queues[ready[0]].popleft()
            if not isinstance(work, Event):
                work()

    def _may_run(self, work):
        return not isinstance(work, Event) or work.has_come


class Event:
    """An event; in a queue, a wait for it."""

    def __init__(self, device, queue):
        self.has_come = False
        self._device = device
        device.queues[queue].append(self._come)

    def _come(self):
        self.has_come = True

    def query(self):
        return self.has_come

    def synchronize(self):
        self._device.run(until=self)


class Stream(TorchDispatchMode):
    """The copy stream: torch's copies inside `active` are put off until the device runs."""

    def __init__(self, device, *, waits=True, holds=True):
        super().__init__()
        self._device = device
        self._waits, self._holds = waits, holds

    def wait_for_compute(self):
        if self._waits:
            self._device.queues["copy"].append(Event(self._device, "compute"))

    def hold_compute(self, event):
        if self._holds:
            self._device.queues["compute"].append(event)

    def record(self):
        return Event(self._device, "copy")

    def active(self):
        return self

    def indices(self, numbers):
        return torch.tensor(numbers)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name not in {"aten::index_select", "aten::index_copy_", "aten::copy_"}:
            return func(*args, **kwargs)
        self._device.queues["copy"].append(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])


def set_up(eager, **orders):
    device = Device(eager)
    cache = torch.zeros(BLOCKS, WIDTH)
    regions = fuse([read_layer("layer", cache, BLOCKS)[1]])
    block_bytes = regions[0].nbytes
    # Fewer rows than blocks are copied at once, so that the staging buffer is used again.
    copier = StagedCopier(regions, torch.device("cpu"), Stream(device, **orders), 2 * block_bytes)
    return device, cache, copier, Slab(4, block_bytes)


def save(eager, **orders):
    """Let a step compute three blocks, save them, and let the next step overwrite them; return what was saved."""
    device, cache, copier, slab = set_up(eager, **orders)
    blocks = [5, 2, 6]
    compute = device.queues["compute"]
    compute.append(lambda: cache.index_fill_(0, torch.tensor(blocks), 1.0))
    transfer = copier.gather(blocks, slab, [0, 1, 2])
    compute.append(lambda: cache.fill_(2.0))
    assert not transfer.done()
    transfer.wait()
    assert transfer.done()
    return [set(slab.view(slot).view("float32")[:WIDTH].tolist()) for slot in range(3)]


def load(eager, **orders):
    """Let a step read three blocks, load others into them, let the next step read; return what both steps read."""
    device, cache, copier, slab = set_up(eager, **orders)
    for slot in range(3):
        slab.view(slot).view("float32")[:] = 3.0
    blocks = [5, 2, 6]
    read = []
    compute = device.queues["compute"]
    compute.append(lambda: read.append(set(cache[blocks].flatten().tolist())))
    transfer = copier.scatter(slab, [0, 1, 2], blocks)
    compute.append(lambda: read.append(set(cache[blocks].flatten().tolist())))
    assert not transfer.done()
    device.run()
    assert transfer.done()
    return read


@pytest.mark.parametrize("eager", ["compute", "copy"])
def test_c1_c4_a_save_gets_what_its_step_computed(eager):
    """C1, C4: a save asked for before the forward has run waits for it, and the next forward waits for the save."""
    assert save(eager) == [{1.0}] * 3


@pytest.mark.parametrize("eager", ["compute", "copy"])
def test_c4_a_load_comes_between_two_steps(eager):
    """The step before doesn't see what is loaded, and the step after sees all of it."""
    assert load(eager) == [{0.0}, {3.0}]


def test_the_controls():
    """Without either order, one of the two streams runs ahead and the bytes are wrong."""
    assert save("copy", waits=False) == [{0.0}] * 3
    assert {2.0} in save("compute", holds=False)
    assert load("copy", waits=False) == [{3.0}, {3.0}]
    assert load("compute", holds=False) == [{0.0}, {0.0}]
