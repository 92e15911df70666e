"""Host memory in one piece: mapped at once, backed and pinned while the engine starts."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

from kvplug.errors import KvplugError
from kvplug.log import get_logger

__all__ = ["HostMemory"]

logger = get_logger(__name__)

#: Backs pages without changing what is in them, so that others may write at the same time. Linux 5.14 and later.
_MADV_POPULATE_WRITE = 23

#: Backed per call. While the kernel backs a piece, nothing else in the process can be mapped or unmapped.
_PIECE = 4 << 20


class HostMemory:
    """An anonymous mapping, which can be pinned for CUDA in one piece.

    The operating system backs the mapping page by page as it is first written, which is slow: a first copy takes
    several times as long as the next one. In the background, a thread of the lowest priority backs all of it, and then
    pins it. Until it is pinned, copies to and from a GPU work, but the host waits for them.

    Args:
        nbytes: Bytes, a multiple of the page size.
        pin: Register the memory with CUDA.
        background: Back the memory, and pin it, in the background. What fails there is logged, and costs only speed.
            Otherwise it is backed as it is written, or when it is pinned, which is then waited for.

    Attributes:
        nbytes: Bytes mapped.
        address: Address of the first byte.

    Raises:
        KvplugError: The memory can't be had, or can't be pinned.

    """

    def __init__(self, nbytes: int, *, pin: bool = False, background: bool = False) -> None:
        self.nbytes = nbytes
        self._mapping: mmap.mmap | None = _map(nbytes)
        self._view = memoryview(self._mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._pinned = False
        self._preparation: _Preparation | None = None
        if background:
            self._preparation = _Preparation(self._view, self.address, pin=pin)
            # Stops the thread if this object is forgotten, or the interpreter ends, without `close`.
            weakref.finalize(self, self._preparation.stop.set)
            self._preparation.start()
        elif pin:
            try:
                _cuda_register(self.address, nbytes)
            except BaseException:
                self.close()
                raise
            self._pinned = True

    @property
    def view(self) -> memoryview:
        """The memory, as a writable memoryview of format "B"."""
        if self._mapping is None:
            raise ValueError("the slab is closed")
        return self._view

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with CUDA by now."""
        return self._pinned or (self._preparation is not None and self._preparation.pinned)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the background to end, at most `timeout` seconds, and return whether it has."""
        if self._preparation is None:
            return True
        self._preparation.join(timeout)
        return not self._preparation.is_alive()

    def close(self) -> None:
        """Stop the background, unpin the memory and give it back. Closing again does nothing.

        Memory that is still referred to is given back when the last reference to it is gone.
        """
        if self._mapping is None:
            return
        if self._preparation is not None:
            self._preparation.stop.set()
            self._preparation.join()
        if self.pinned:
            _cuda_unregister(self.address)
        self._pinned, self._preparation = False, None
        mapping, self._mapping = self._mapping, None
        with suppress(BufferError):  # somebody holds a view; the mapping goes with it
            self._view.release()
            mapping.close()


class _Preparation(threading.Thread):
    """Backs memory and pins it. Knows nothing of its owner, so as not to keep it alive, but holds the mapping."""

    def __init__(self, memory: memoryview, address: int, *, pin: bool) -> None:
        super().__init__(name="kvplug-l1-memory", daemon=True)
        self.stop = threading.Event()
        self.pinned = False
        self._memory = memoryview(memory)
        self._address = address
        self._pin = pin

    def run(self) -> None:
        """Back all of it, then pin it. A failure is logged: L1 works without."""
        try:
            if sys.platform == "linux":
                # Of this thread alone, in Linux.
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
                self._back()
            if self._pin and not self.stop.is_set():
                _cuda_register(self._address, self._memory.nbytes)
                self.pinned = True
        except KvplugError as error:
            logger.warning("kvplug: L1 goes on without pinned memory, with slower copies. %s", error)
        finally:
            self._memory.release()

    def _back(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike mmap's own, it lets other threads run
        for start in range(0, self._memory.nbytes, _PIECE):
            if self.stop.is_set():
                return
            size = min(_PIECE, self._memory.nbytes - start)
            if madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                number = ctypes.get_errno()
                if number == errno.EINTR:
                    continue  # this piece is backed as it is written
                if number == errno.EINVAL:
                    logger.info("kvplug: This kernel can't back memory ahead: L1 is backed as it is written.")
                else:
                    logger.warning(
                        "kvplug: Only %d of %d bytes of L1 could be backed ahead (%s): set a smaller size if the "
                        "host's memory isn't enough.",
                        start,
                        self._memory.nbytes,
                        os.strerror(number),
                    )
                return


def _map(nbytes: int) -> mmap.mmap:
    try:
        # Private: shared anonymous memory would count as shm, which containers limit.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        msg = (
            f"Can't allocate {nbytes} bytes ({nbytes / 2**30:.1f} GiB) of host memory for KV blocks ({error}): "
            "set a smaller capacity, or give the process more memory."
        )
        raise KvplugError(msg) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # First touch is what makes a new slab slow; huge pages make it 512 times rarer.
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _cuda_register(address: int, nbytes: int) -> None:
    """Pin memory that CUDA didn't allocate."""
    error: object
    try:
        error = _cudart().cudaHostRegister(address, nbytes, 0)
    except (RuntimeError, AssertionError) as exception:  # no driver, no device, or torch without CUDA
        error = exception
    if isinstance(error, Exception) or int(error) != 0:  # type: ignore[call-overload]
        msg = (
            f"Can't pin {nbytes} bytes ({nbytes / 2**30:.1f} GiB) of host memory for KV blocks "
            f"(cudaHostRegister: {error}): set a smaller capacity, or raise the limit of locked memory (ulimit -l)."
        )
        raise KvplugError(msg) from (error if isinstance(error, Exception) else None)


def _cuda_unregister(address: int) -> None:
    _cudart().cudaHostUnregister(address)
