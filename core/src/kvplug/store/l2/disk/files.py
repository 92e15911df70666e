"""Bytes between memory and files, without a copy in between.

Buffered, they go through the page cache. Direct, the disk reads and writes the memory itself, which has to begin on a
page boundary, in whole pages; the rest of a value, less than a page, is read through one page of our own, and written
through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading

import numpy as np

__all__ = [
    "PAGE",
    "fill",
    "is_aligned",
    "read_buffered",
    "read_cached",
    "read_direct",
    "start_writeback",
    "write_buffered",
    "write_direct",
    "write_over",
]

#: What direct reads and writes are aligned to, and multiples of. Disks may ask for less, hardly any for more.
PAGE = 4096

_own = threading.local()

_sync_file_range = ctypes.CDLL(None).sync_file_range  # unlike a call with the interpreter's lock, others go on
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE = 2


def is_aligned(memory: memoryview) -> bool:
    """Say whether memory begins on a page boundary."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


def read_cached(descriptor: int, buffer: memoryview) -> int:
    """Read what the page cache has of a file's beginning, without waiting for the disk; return how many bytes."""
    try:
        return os.preadv(descriptor, [buffer], 0, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):  # nothing, or the file system can't tell
            return 0
        raise


def read_buffered(descriptor: int, buffer: memoryview, done: int = 0) -> int:
    """Read a file into a buffer, which already has its first `done` bytes, and return how many it has then."""
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], done)
        if count == 0:
            break
        done += count
    return done


def fill(descriptor: int, value: memoryview, *, direct: bool, over: bool) -> None:
    """Write a file: past the page cache where that is wanted and possible, or over what it has already."""
    done = 0
    if direct and is_aligned(value):
        done = write_direct(descriptor, value)
    elif over:
        # What was read ahead is in the page cache in single pages, which go to the disk in small requests.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if over:
        write_over(descriptor, value, done)
    elif done < len(value):
        write_buffered(descriptor, value, done)
    if not done:  # of direct writes only the last page is left, which is no hurry
        start_writeback(descriptor)


def write_buffered(descriptor: int, value: memoryview, done: int = 0) -> None:
    """Write a file, which already has the value's first `done` bytes."""
    while done < len(value):
        done += os.pwrite(descriptor, value[done:], done)


def write_direct(descriptor: int, value: memoryview) -> int:
    """Write a file's whole pages past the page cache, from aligned memory, and return how many bytes they have.

    The rest is for the page cache: written directly, as a page, it would have to be cut off again, for which the file
    system reads the page from the disk.
    """
    whole = len(value) - len(value) % PAGE
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    done = 0
    while done < whole:
        done += os.pwrite(descriptor, value[done:whole], done)
        if done % PAGE:  # direct writes can't go on there
            raise OSError(errno.EIO, "a write ended within a page")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return whole


def start_writeback(descriptor: int) -> None:
    """Let the disk begin with what was written to a file, without waiting for it.

    The kernel would begin seconds later, or when much of the memory is to be written; a disk that had nothing to do
    until then is what writers wait for in the end. It is advice: what goes wrong shows as it would without.
    """
    _sync_file_range(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


def write_over(descriptor: int, value: memoryview, done: int = 0) -> None:
    """Write over a file of the same length, in whole pages, and cut it again. It has the value's first `done` bytes.

    For a part of a page, the rest of it would be read first.
    """
    end = len(value) % PAGE
    whole = len(value) - end
    page = _page()
    page[:end] = value[whole:]
    total = whole + (PAGE if end else 0)
    while done < total:
        parts = [value[done:whole], page] if end else [value[done:whole]]
        count = os.pwritev(descriptor, parts, done) if done < whole else os.pwrite(descriptor, page, done)
        if count % PAGE:
            raise OSError(errno.EIO, "a write ended within a page")
        done += count
    if end:
        os.ftruncate(descriptor, len(value))


def read_direct(descriptor: int, buffer: memoryview) -> int:
    """Read a file that was opened with O_DIRECT into aligned memory, and return how many bytes there were."""
    end = len(buffer) % PAGE
    whole = len(buffer) - end
    page = _page()
    done = 0
    while done < len(buffer):
        if done < whole:
            count = os.preadv(descriptor, [buffer[done:whole], page] if end else [buffer[done:]], done)
        else:
            count = os.preadv(descriptor, [page], done)
        if done + count > whole:
            count = min(count, len(buffer) - done)
            buffer[whole : done + count] = page[: done + count - whole]
        done += count
        if count == 0 or done % PAGE:
            break  # the file ends here
    return done


def _page() -> memoryview:
    """Return this thread's page for the ends of values."""
    page: memoryview | None = getattr(_own, "page", None)
    if page is None:
        page = _own.page = memoryview(mmap.mmap(-1, PAGE))
    return page
