"""Bytes between memory and files, without a copy in between.

Buffered, they go through the page cache. Direct, the disk reads and writes the memory itself, which has to begin on a
page boundary, in whole pages; the rest of a value, less than a page, goes through one page of our own.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading

import numpy as np

__all__ = [
    "PAGE",
    "is_aligned",
    "read_buffered",
    "read_cached",
    "read_direct",
    "write_buffered",
    "write_direct",
    "write_over",
]

#: What direct reads and writes are aligned to, and multiples of. Disks may ask for less, hardly any for more.
PAGE = 4096

_own = threading.local()


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


def write_buffered(descriptor: int, value: memoryview) -> None:
    """Write a file from its beginning."""
    done = 0
    while done < len(value):
        done += os.pwrite(descriptor, value[done:], done)


def write_over(descriptor: int, value: memoryview) -> None:
    """Write a file, from its beginning, that already has a value of the same length.

    In whole pages: for a part of one, the rest would have to be read from the disk.
    """
    write_buffered(descriptor, value[: len(value) - len(value) % PAGE])
    if len(value) % PAGE:
        page, whole = _page(), len(value) - len(value) % PAGE
        page[: len(value) - whole] = value[whole:]
        os.pwrite(descriptor, page, whole)
        os.ftruncate(descriptor, len(value))


def read_direct(descriptor: int, buffer: memoryview) -> int:
    """Read a file that was opened with O_DIRECT into aligned memory, and return how many bytes there were."""
    page = _page()
    end = len(buffer) % PAGE
    whole = len(buffer) - end
    done = 0
    while done < whole:
        count = os.preadv(descriptor, [buffer[done:whole]], done)
        done += count
        if count == 0 or done % PAGE:
            return done  # the file ends here
    if end:
        count = min(os.preadv(descriptor, [page], done), end)
        buffer[done : done + count] = page[:count]
        done += count
    return done


def write_direct(descriptor: int, value: memoryview) -> None:
    """Write a file opened with O_DIRECT, from aligned memory."""
    page = _page()
    whole = len(value) - len(value) % PAGE
    done = 0
    while done < whole:
        count = os.pwrite(descriptor, value[done:whole], done)
        done += count - count % PAGE
        if count < PAGE:  # can't go on in the middle of a page: let the disk say why
            raise OSError(errno.EIO, "a direct write ended within a page")
    if whole < len(value):
        page[: len(value) - whole] = value[whole:]
        os.pwrite(descriptor, page, whole)
        os.ftruncate(descriptor, len(value))


def _page() -> memoryview:
    """Return this thread's page for the ends of values."""
    page: memoryview | None = getattr(_own, "page", None)
    if page is None:
        page = _own.page = memoryview(mmap.mmap(-1, PAGE))
    return page
