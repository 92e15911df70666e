"""Host memory: backed and pinned, at once or in the background."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvplug.errors import KvplugError
from kvplug.store import Slab


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """Return what is logged, although vLLM's logger keeps its lines to itself."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.kvplug.store.host_memory")
    return caplog


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class _Cudart:
    def __init__(self, error=0):
        self.error = error
        self.calls = []

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(("register", address, nbytes, flags))
        return self.error

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0


def test_i2_pinning_registers_all_memory_in_one_piece(monkeypatch):
    """A pinned slab is registered once, as a whole, and unregistered once, before its memory goes."""
    cudart = _Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    slab = Slab(3, 5000, pin=True)
    address = slab.address(0)
    assert slab.pinned
    slab.close()
    slab.close()
    assert cudart.calls == [("register", address, slab.nbytes, 0), ("unregister", address)]
    assert not slab.pinned


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch):
    """An error code of CUDA is an error that names the bytes and the remedy, and nothing is unregistered."""
    cudart = _Cudart(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.raises(KvplugError, match=r"Can't pin 4096 bytes .*ulimit -l"):
        Slab(1, 64, pin=True)
    assert [call[0] for call in cudart.calls] == ["register"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinning_without_cuda_is_an_error():
    """Without CUDA, pinning fails with a clear error."""
    with pytest.raises(KvplugError, match="Can't pin"):
        Slab(1, 64, pin=True)


def test_kernels_without_huge_pages_will_do(monkeypatch):
    """The advice about huge pages may be refused."""
    import mmap

    class Memory(mmap.mmap):
        def madvise(self, *args):
            raise OSError(22, "Invalid argument")

    module = SimpleNamespace(
        mmap=Memory,
        MAP_PRIVATE=mmap.MAP_PRIVATE,
        MAP_ANONYMOUS=mmap.MAP_ANONYMOUS,
        MADV_HUGEPAGE=14,
        PAGESIZE=mmap.PAGESIZE,
    )
    monkeypatch.setattr("kvplug.store.host_memory.mmap", module)
    Slab(1, 64).view(0)[:] = 1


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "kvplug-l1-memory"]


@pytest.mark.skipif(sys.platform != "linux", reason="backs memory with Linux's madvise")
def test_memory_is_backed_in_the_background():
    """Nothing is written to a new slab, and yet all of it gets backed, around what others write meanwhile."""
    before = _resident_bytes()
    slab = Slab(48, 1 << 20, header_bytes=64, background=True)
    slab.view(47)[:] = 7
    assert slab.wait_prepared(60)
    assert _resident_bytes() - before >= 48 << 20
    assert (slab.view(47) == 7).all()
    assert (slab.view(0) == 0).all()
    assert not slab.pinned
    slab.close()
    assert not _threads()
    assert _resident_bytes() - before < 24 << 20


class _Madvise:
    """Stands for libc: holds each call until it is told to go on."""

    def __init__(self, result=0, errno=0):
        self.calls = 0
        self.go_on = threading.Semaphore(0)
        self.result, self.errno = result, errno

    def madvise(self, *args):
        self.calls += 1
        assert self.go_on.acquire(timeout=60)
        ctypes.set_errno(self.errno)
        return self.result


@pytest.fixture
def madvise(monkeypatch):
    """Return a function that puts a stand-in in libc's place."""

    def stand_in(**options):
        libc = _Madvise(**options)
        monkeypatch.setattr("kvplug.store.host_memory.ctypes.CDLL", lambda *args, **kwargs: libc)
        return libc

    return stand_in


@pytest.mark.parametrize("forget", [False, True])
def test_closing_stops_the_background(madvise, forget):
    """A slab that is closed, or forgotten, ends its thread after the piece in hand, and isn't backed to its end."""
    libc = madvise()
    slab = Slab(64, 1 << 20, background=True)
    libc.go_on.release()
    (thread,) = _threads()
    assert not slab.wait_prepared(0)
    if forget:
        del slab
        gc.collect()
        libc.go_on.release(2)
    else:
        threading.Timer(0.05, libc.go_on.release, (2,)).start()
        slab.close()
    thread.join(60)
    assert not thread.is_alive()
    assert libc.calls < 16


@pytest.mark.parametrize(
    ("errno", "level", "message"),
    [(22, "INFO", "This kernel can't back memory ahead"), (12, "WARNING", "Only 0 of .* set a smaller size")],
)
def test_memory_that_is_not_backed_ahead_is_backed_as_it_is_written(madvise, caplog_vllm, errno, level, message):
    """An old kernel, or one without memory, is told of in one line, and the slab works."""
    libc = madvise(result=-1, errno=errno)
    libc.go_on.release(1)
    slab = Slab(64, 1 << 20, background=True)
    assert slab.wait_prepared(60)
    slab.view(3)[:] = 7
    (record,) = caplog_vllm.records
    assert record.levelname == level
    assert re.search(message, record.getMessage())


def test_i2_the_background_pins_all_memory_in_one_piece(monkeypatch):
    """Pinning doesn't hold up the start: it follows in one piece, and goes when the slab is closed."""
    registering, go_on = threading.Event(), threading.Event()

    class Slow(_Cudart):
        def cudaHostRegister(self, *args):
            registering.set()
            assert go_on.wait(60)
            return super().cudaHostRegister(*args)

    cudart = Slow()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    slab = Slab(3, 5000, pin=True, background=True)
    address = slab.address(0)
    assert registering.wait(60)
    assert not slab.pinned
    slab.view(0)[:] = 7
    go_on.set()
    assert slab.wait_prepared(60)
    assert slab.pinned
    slab.close()
    assert cudart.calls == [("register", address, slab.nbytes, 0), ("unregister", address)]


def test_memory_that_cannot_be_pinned_in_the_background_is_reported(monkeypatch, caplog_vllm):
    """The engine runs on with slower copies, and the log says why and what helps."""
    cudart = _Cudart(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    slab = Slab(3, 5000, pin=True, background=True)
    assert slab.wait_prepared(60)
    assert not slab.pinned
    slab.view(0)[:] = 7
    slab.close()
    assert [call[0] for call in cudart.calls] == ["register"]
    (record,) = caplog_vllm.records
    assert "without pinned memory" in record.getMessage()
    assert "ulimit -l" in record.getMessage()
