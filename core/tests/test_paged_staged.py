"""The copy path for devices, as far as it can be shown without one: order of work, staging, failures."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvplug.paged.layout import fuse, read_layer
from kvplug.paged.staged import StagedCopier
from kvplug.store import Slab

NUM_BLOCKS = 10


class RecordingStream:
    """A stream that writes down what is asked of it."""

    def __init__(self, log):
        self.log = log
        self.events = 0
        self.is_active = False

    def wait_for_compute(self):
        self.log.append("copies wait for compute")

    def hold_compute(self, event):
        self.log.append(f"compute waits for {event.name}")

    def record(self):
        self.events += 1
        event = RecordedEvent(f"event {self.events}", self.log)
        self.log.append(event.name)
        return event

    @contextlib.contextmanager
    def active(self):
        self.is_active = True
        yield
        self.is_active = False

    def indices(self, numbers):
        self.log.append(f"blocks {numbers}")
        return torch.tensor(numbers)


class RecordedEvent:
    def __init__(self, name, log):
        self.name = name
        self.log = log

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")

    def query(self):
        return False


_OPERATIONS = {"index_select": "cache -> staging", "index_copy_": "staging -> cache", "copy_": "bus"}


class RecordingMode(TorchDispatchMode):
    """Writes down which tensors torch copies between the cache, the staging buffer and the slab."""

    def __init__(self, log, stream, fail_at=None):
        super().__init__()
        self.log = log
        self.stream = stream
        self.fail_at = fail_at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = _OPERATIONS.get(func._schema.name.removeprefix("aten::"))
        if name is not None:
            assert self.stream.is_active
            target = (kwargs or {}).get("out", args[0])
            if name == "bus":
                assert args[2] is True  # non_blocking
                assert args[0].is_contiguous()
                assert args[1].is_contiguous()
                name += f" {target.shape[0]}"
            if name == self.fail_at:
                raise RuntimeError("out of memory")
            self.log.append(name)
        return func(*args, **(kwargs or {}))


def _setup(staging_blocks=4, layers=2):
    log = []
    stream = RecordingStream(log)
    tensors = [torch.randn(2, NUM_BLOCKS, 16, 32) for _ in range(layers)]
    regions = fuse([read_layer("layer", tensor, NUM_BLOCKS)[1] for tensor in tensors])
    block_bytes = sum(region.nbytes for region in regions)
    copier = StagedCopier(regions, torch.device("cpu"), stream, staging_blocks * block_bytes)
    return log, stream, copier, Slab(12, block_bytes), tensors


def test_c1_a_gather_is_ordered_against_compute():
    """Reads come between what was computed and what is computed next; slots are valid after the last event."""
    log, stream, copier, slab, _ = _setup()
    with RecordingMode(log, stream):
        transfer = copier.gather([3, 4, 7], slab, [5, 6, 1])
    assert log == [
        "copies wait for compute",
        "blocks [7, 3, 4]",
        "cache -> staging",
        "cache -> staging",
        "event 1",
        "bus 1",
        "bus 2",
        "event 2",
        "compute waits for event 1",
    ]
    assert not transfer.done()
    transfer.wait()
    assert log[-1] == "host waits for event 2"


def test_a_scatter_is_ordered_against_compute():
    """Writes come after what was computed, and what is computed next waits for all of them."""
    log, stream, copier, slab, _ = _setup()
    with RecordingMode(log, stream):
        copier.scatter(slab, [5, 6, 1], [3, 4, 7])
    assert log == [
        "copies wait for compute",
        "blocks [7, 3, 4]",
        "bus 1",
        "bus 2",
        "staging -> cache",
        "staging -> cache",
        "event 1",
        "compute waits for event 1",
    ]


def test_more_than_fits_goes_in_several_rounds():
    """The staging buffer is bounded: many blocks take several rounds, and compute waits for the last one's reads."""
    log, stream, copier, slab, tensors = _setup(staging_blocks=2, layers=1)
    blocks, slots = [9, 8, 7, 6, 5], [0, 1, 2, 3, 4]
    with RecordingMode(log, stream):
        copier.gather(blocks, slab, slots)
    assert [line for line in log if line.startswith(("bus", "compute"))] == [
        "bus 2",
        "bus 2",
        "bus 1",
        "compute waits for event 3",
    ]
    assert copier._staging.numel() == 2 * slab.slot_stride
    for block, slot in zip(blocks, slots, strict=True):
        assert slab.view(slot).tobytes() == tensors[0][:, block].contiguous().numpy().tobytes()


def test_consecutive_slots_cross_the_bus_together():
    """A batch of new blocks, whose slots are neighbours, is one transfer whatever the order of its blocks."""
    log, stream, copier, slab, _ = _setup(staging_blocks=8)
    with RecordingMode(log, stream):
        copier.gather([1, 2, 3, 4, 5], slab, [4, 2, 3, 6, 5])
    assert [line for line in log if line.startswith("bus")] == ["bus 5"]


def test_one_block_larger_than_the_buffer_still_goes():
    """The staging buffer holds at least one block."""
    _, _, copier, slab, tensors = _setup(staging_blocks=0)
    copier.gather([2], slab, [7])
    tensors[1].zero_()
    copier.scatter(slab, [7], [5])
    assert torch.equal(tensors[0][:, 5], tensors[0][:, 2])
    assert tensors[1][:, 5].abs().sum() > 0


@pytest.mark.parametrize(
    ("direction", "fail_at"), [("gather", "bus 1"), ("gather", "cache -> staging"), ("scatter", "staging -> cache")]
)
def test_a_copy_that_fails_half_way_is_over_when_the_error_comes_out(direction, fail_at):
    """After an error nothing is still on its way: the slots may be given to someone else at once."""
    log, stream, copier, slab, _ = _setup()
    blocks, slots = [3, 4, 7], [5, 6, 1]
    arguments = (blocks, slab, slots) if direction == "gather" else (slab, slots, blocks)
    with RecordingMode(log, stream, fail_at), pytest.raises(RuntimeError, match="out of memory"):
        getattr(copier, direction)(*arguments)
    assert log[-1].startswith("host waits for event")
    assert log[-2] == log[-1].removeprefix("host waits for ")
    stream.is_active = False
    copier.gather([1], slab, [0])


def test_a_slab_with_other_slots_uses_the_same_buffer():
    """Slabs with larger slots are served as long as one fits into the staging buffer."""
    _, _, copier, _, tensors = _setup(staging_blocks=4)
    slab = Slab(3, 3 * 8192)
    copier.gather([4, 6], slab, [0, 2])
    expected = b"".join(tensor[:, 6].contiguous().numpy().tobytes() for tensor in tensors)
    assert slab.view(2)[: len(expected)].tobytes() == expected
    with pytest.raises(ValueError, match="doesn't fit into the staging buffer"):
        copier.gather([4], Slab(1, 1 << 20), [0])


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_odd_alignments_are_copied_exactly(offset):
    """Blocks that don't start at multiples of 8 bytes are moved in smaller words, to the byte."""
    raw = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    tensor = raw.as_strided((NUM_BLOCKS, 3, 77), (999, 231 + offset, 1), offset)
    region = read_layer("layer", tensor, NUM_BLOCKS)[1]
    copier = StagedCopier(fuse([region]), torch.device("cpu"), RecordingStream([]))
    slab = Slab(3, region.nbytes)
    block = tensor[4].clone()
    copier.gather([4], slab, [1])
    assert slab.view(1).tobytes() == block.numpy().tobytes()
    copier.scatter(slab, [1], [9])
    assert torch.equal(tensor[9], block)


@pytest.mark.parametrize("staging_blocks", [0, 3])
def test_slots_with_headers_are_copied_whole(staging_blocks):
    """Blocks come back as they were from slots with headers, also where only one slot can be staged."""
    log, stream, copier, _, tensors = _setup(staging_blocks=staging_blocks)
    slab = Slab(12, sum(tensor[:, 0].nbytes for tensor in tensors), header_bytes=64)
    before = [tensor.clone() for tensor in tensors]
    with RecordingMode(log, stream):
        copier.gather([3, 4, 7], slab, [5, 6, 1])
    for slot, block in ((5, 3), (6, 4), (1, 7)):
        payload = b"".join(tensor[:, block].numpy().tobytes() for tensor in tensors)
        assert bytes(slab.value_view(slot)[64:]) == payload
    for tensor in tensors:
        tensor.zero_()
    with RecordingMode(log, stream):
        copier.scatter(slab, [5, 6, 1], [3, 4, 7])
    for tensor, old in zip(tensors, before, strict=True):
        assert (tensor[:, [3, 4, 7]] == old[:, [3, 4, 7]]).all()
        assert not tensor[:, [0, 1, 2, 5, 6, 8, 9]].any()
