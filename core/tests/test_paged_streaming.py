"""The compiled copy of many runs of bytes, and when it is used."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvplug.paged import streaming
from kvplug.paged.host import HostCopier
from kvplug.paged.layout import fuse, read_layer
from kvplug.paged.streaming import LINE, streaming_copy
from kvplug.store import Slab


def lines(count):
    """Return memory of as many cache lines, starting where one starts."""
    memory = np.zeros(count * LINE + LINE, dtype=np.uint8)
    return memory[-memory.ctypes.data % LINE :][: count * LINE]


def addresses(memory, starts):
    return np.array([memory.ctypes.data + start * LINE for start in starts], dtype=np.uintp)


def test_runs_are_copied_and_nothing_else():
    """Each run's bytes come to its target, whatever its length; all other bytes stay."""
    rng = np.random.default_rng(0)
    source, target = lines(100), lines(100)
    source[:] = rng.integers(1, 256, source.size)
    sizes = [1, 7, 3, 1, 20]
    targets, sources = [3, 50, 4, 99, 10], [80, 0, 7, 99, 30]
    expected = target.copy()
    for to, come_from, size in zip(targets, sources, sizes, strict=True):
        expected[to * LINE : (to + size) * LINE] = source[come_from * LINE : (come_from + size) * LINE]
    copy = streaming_copy()
    assert copy is not None, "llvmlite comes with vLLM"
    copy(addresses(target, targets), addresses(source, sources), np.array(sizes, dtype=np.uintp) * LINE)
    assert (target == expected).all()


def test_no_runs_are_fine():
    """Nothing is copied if there is nothing to copy."""
    none = np.array([], dtype=np.uintp)
    streaming_copy()(none, none, none)


class Spy:
    """Copies, and counts calls and runs."""

    def __init__(self):
        self.runs = []

    def __call__(self, targets, sources, sizes):
        self.runs.append(len(sizes))
        streaming_copy()(targets, sources, sizes)


def copier(tensors, spy, num_blocks=9):
    regions = [read_layer(f"layer.{n}", tensor, num_blocks)[1] for n, tensor in enumerate(tensors)]
    fused = fuse(regions)
    return HostCopier(fused, spy), sum(region.nbytes for region in fused)


@pytest.mark.parametrize(("elements", "runs"), [(LINE, [6, 6]), (LINE - 2, [])], ids=["lines", "parts of lines"])
def test_whole_cache_lines_are_streamed_in_one_call(elements, runs):
    """All layers' pieces of all blocks go in one call. Pieces that end inside a cache line are left to numpy."""
    torch.manual_seed(0)
    tensors = [torch.randint(0, 256, (9, elements), dtype=torch.uint8) for _ in range(3)]
    spy = Spy()
    copies, block_bytes = copier(tensors, spy)
    slab = Slab(4, block_bytes)
    before = [tensor.clone() for tensor in tensors]
    copies.gather([2, 5], slab, [3, 1])
    copies.scatter(slab, [3, 1], [7, 8])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[7, 8]], old[[2, 5]])
        assert torch.equal(tensor[:7], old[:7])
    assert spy.runs == runs


def test_a_slab_whose_slots_start_inside_lines_is_left_to_numpy():
    """What is streamed must be whole lines on both sides."""
    tensors = [torch.randint(0, 256, (9, LINE), dtype=torch.uint8)]
    spy = Spy()
    copies, _ = copier(tensors, spy)
    slab = Slab(2, LINE + 1)
    assert slab.slot_stride % LINE
    copies.gather([2, 5], slab, [1, 0])
    assert (slab.view(1)[:LINE] == tensors[0][2].numpy()).all()
    assert not spy.runs


@pytest.fixture
def compiled_again():
    """Have `streaming_copy` compile anew in a test and after it."""
    streaming_copy.cache_clear()
    yield
    streaming_copy.cache_clear()


@pytest.mark.usefixtures("compiled_again")
def test_without_llvmlite_numpy_copies(monkeypatch, caplog):
    """Nobody has to have llvmlite: a line in the log says what is lost."""
    caplog.set_level(logging.INFO, logger=streaming.logger.name)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    assert streaming_copy() is None
    assert "copied by numpy" in caplog.text


@pytest.mark.usefixtures("compiled_again")
def test_where_llvm_fails_numpy_copies(monkeypatch, caplog):
    """A CPU that LLVM doesn't know costs speed, and a warning says why."""
    from llvmlite import binding

    def fail():
        raise RuntimeError("no such CPU")

    monkeypatch.setattr(binding, "get_host_cpu_features", fail)
    assert streaming_copy() is None
    assert "no such CPU" in caplog.text


#: What vLLM does in every module when an engine starts on a CPU.
SCAN = """
import sys
for module in list(sys.modules.values()):
    for name, value in list(getattr(module, "__dict__", {}).items()):
        if hasattr(value, "__dict__"):
            vars(value).get("kernel")
"""


@pytest.mark.engine  # imports torch in a process of its own
@pytest.mark.parametrize("own", [True, False], ids=["kvplug's import", "plain import"])
def test_another_engine_can_start_after_it(own):
    """The libraries imported for it can be inspected as vLLM does; after a plain import of llvmlite they can't."""
    before = "import kvplug.paged.streaming as it; assert it.streaming_copy()" if own else "import llvmlite.binding"
    done = subprocess.run([sys.executable, "-c", f"{before}\n{SCAN}"], capture_output=True, text=True, check=False)
    if own:
        assert done.returncode == 0, done.stderr
    else:
        assert "has no attribute 'get'" in done.stderr
