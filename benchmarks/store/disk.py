"""The disk tier against a plain sequential program on the same disk.

The program writes all values one after another to one file that stays open, and reads them from it in the same order.
The tier has a file for each value, a name to find it by, and a cap. Both have the same durability, which is the page
cache's: neither waits for the disk after a value. The tier is called as the store's client calls it, with a few values
at a time, from as many threads. So three things are compared:

- *disk*: writes until all of it is on the disk (`syncfs` at the end), into an empty directory and into a full one;
  reads of files that aren't in the page cache.
- *direct*: both past the page cache.
- *cached*: the page cache's part: writes that end when the page cache has the bytes, reads of what it has.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import median

from benchmarks.common.figures import Figure

from kvplug.store.l2.disk import DiskSettings, DiskTier

__all__ = ["measure"]

_ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20
_HEADER = 64
#: Values in one call, and calls at a time: the client leaves one thread free for calls that somebody waits for.
_BATCH = 8
_CALLS = DiskTier.max_calls - 1
_TIMEOUT = 600.0
#: For the disk to discard what the last turn has given back, which nobody waits for.
_SETTLE_SECONDS = 0.5

_libc = ctypes.CDLL(None, use_errno=True)
_numbers = count()


def measure(*, quick: bool = False) -> list[Figure]:
    """Measure the tier and the plain program in turns."""
    total, repeats = (64 * _MIB, 2) if quick else (512 * _MIB, 7)
    rates: dict[str, tuple[float, float]] = {}
    with _scratch() as folder:
        for size in (_MIB, 4 * _MIB):
            rates |= _Comparison(folder, size, total // size, repeats).rates()
    return [
        _figure("disk_write_vs_raw", rates, ("write disk", "write full", "write direct"), at_least=0.8),
        _figure("disk_read_vs_raw", rates, ("read disk", "read direct"), at_least=0.8),
        _figure("disk_write_cached_vs_raw", rates, ("write cached",)),
        _figure("disk_read_cached_vs_raw", rates, ("read cached",)),
    ]


def _figure(
    name: str, rates: dict[str, tuple[float, float]], kinds: Sequence[str], *, at_least: float | None = None
) -> Figure:
    chosen = {label: pair for label, pair in rates.items() if label.startswith(tuple(kinds))}
    detail = ", ".join(f"{label}: {ours:.2f} of {raw:.2f} GB/s" for label, (ours, raw) in chosen.items())
    return Figure(
        name, min(ours / raw for ours, raw in chosen.values()), at_least=at_least, detail=f"lowest of {detail}"
    )


@contextmanager
def _scratch() -> Iterator[Path]:
    """Give a folder on the disk that the repository is on, and remove it."""
    folder = _ROOT / "build" / "bench-store" / f"disk-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _syncfs(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(descriptor)


def _forget(folder: Path) -> None:
    """Drop a folder's files, which are on the disk, from the page cache."""
    _syncfs(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _empty(folder: Path) -> None:
    """Give a folder's bytes back, but leave the files until the end.

    For a minute or more after files were removed, ext4 looks at each of them for one to use when a new one is made. Who
    comes next would pay for that, unlike a directory that fills, or a full one, in which values are written over.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def _slots(number: int, size: int) -> list[memoryview]:
    """Return values like those of a slab: a header and a payload, each slot on a page boundary, in huge pages."""
    stride = -(-(size + _HEADER) // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = mmap.mmap(-1, number * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapping)
    for start in range(0, len(memory), _MIB):
        part = memory[start : start + _MIB]
        part[:] = os.urandom(len(part))
    return [memory[index * stride : index * stride + size + _HEADER] for index in range(number)]


class _Raw:
    """The plain sequential program."""

    def __init__(self, path: Path, slots: list[memoryview], number: int, *, direct: bool = False) -> None:
        self._path = path
        self._slots = slots
        self._number = number
        self._direct = os.O_DIRECT if direct else 0
        # Direct I/O is in whole pages; the plain program leaves the rest of the last one away.
        self._length = len(slots[0]) // mmap.PAGESIZE * mmap.PAGESIZE if direct else len(slots[0])

    def write(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | self._direct, 0o600)
        for index in range(self._number):
            os.pwrite(descriptor, self._slots[index % _BATCH][: self._length], index * self._length)
        os.close(descriptor)

    def read(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | self._direct)
        for index in range(self._number):
            os.preadv(descriptor, [self._slots[index % _BATCH][: self._length]], index * self._length)
        os.close(descriptor)


class _Ours:
    """The tier, filled with new values in each pass."""

    def __init__(self, folder: Path, slots: list[memoryview], number: int, *, direct: bool = False) -> None:
        self._slots = slots
        self._number = number
        # Room for one pass: a second one finds the directory full.
        size = number * (len(slots[0]) + 3 * mmap.PAGESIZE) + _MIB
        settings = DiskSettings.model_validate({"disk_path": folder, "disk_size": size, "disk_direct": direct})
        self.tier = DiskTier(settings)
        self.tier.open(max_value_bytes=len(slots[0]), timeout=_TIMEOUT)
        self._keys: list[bytes] = []

    def write(self) -> None:
        self._keys = [next(_numbers).to_bytes(48, "big") for _ in range(self._number)]
        self._call(self._put)

    def read(self) -> None:
        self._call(self._get)

    def _put(self, keys: list[bytes], slots: list[memoryview]) -> None:
        if not all(self.tier.put(keys, slots, _TIMEOUT)):
            raise AssertionError("the tier kept less than it was given")

    def _get(self, keys: list[bytes], slots: list[memoryview]) -> None:
        if any(length != len(slots[0]) for length in self.tier.get(keys, slots, _TIMEOUT)):
            raise AssertionError("the tier lost what it was given")

    def _call(self, function: Callable[[list[bytes], list[memoryview]], None]) -> None:
        """Call the tier with all keys, a few in each call, on a few threads, each of which has slots of its own."""
        starts = iter(range(0, self._number, _BATCH))  # `next` of it is atomic

        def work(slots: list[memoryview]) -> None:
            for start in starts:
                keys = self._keys[start : start + _BATCH]
                function(keys, slots[: len(keys)])

        with ThreadPoolExecutor(_CALLS) as threads:
            for done in [
                threads.submit(work, self._slots[first : first + _BATCH])
                for first in range(0, len(self._slots), _BATCH)
            ]:
                done.result()


class _Comparison:
    """Both programs, in turns, with values of one size."""

    def __init__(self, folder: Path, size: int, number: int, repeats: int) -> None:
        self._folder = folder
        self._label = f"{size // _MIB} MiB"
        self._slots = _slots(_BATCH * _CALLS, size)
        self._number = number
        self._repeats = repeats
        self._seconds: dict[str, tuple[list[float], list[float]]] = {}

    def rates(self) -> dict[str, tuple[float, float]]:
        """Return GB/s of the tier and of the plain program, the medians of all turns, by what was done."""
        for turn in range(self._repeats):
            for direct in (False, True):
                sides = [(0, self._ours), (1, self._raw)]
                for side, run in sides if turn % 2 else reversed(sides):
                    run(side, direct=direct)
        nbytes = self._number * len(self._slots[0]) / 1e9
        return {name: (nbytes / median(ours), nbytes / median(raw)) for name, (ours, raw) in self._seconds.items()}

    def _ours(self, side: int, *, direct: bool) -> None:
        folder = self._new_folder()
        ours = _Ours(folder, self._slots, self._number, direct=direct)
        self._run(side, ours, folder, direct=direct)
        ours.tier.close()
        _empty(folder)

    def _raw(self, side: int, *, direct: bool) -> None:
        folder = self._new_folder()
        self._run(side, _Raw(folder / "file", self._slots, self._number, direct=direct), folder, direct=direct)
        _empty(folder)

    def _new_folder(self) -> Path:
        folder = self._folder / str(next(_numbers))
        folder.mkdir()
        return folder

    def _run(self, side: int, program: _Raw | _Ours, folder: Path, *, direct: bool) -> None:
        _syncfs(folder)
        time.sleep(_SETTLE_SECONDS)
        if direct:
            self._note("write direct", side, _seconds(program.write))
            self._note("read direct", side, _seconds(program.read))
            return
        cached = _seconds(program.write)
        self._note("write cached", side, cached)
        self._note("write disk", side, cached + _seconds(lambda: _syncfs(folder)))
        self._note("read cached", side, _seconds(program.read))
        _forget(folder)
        self._note("read disk", side, _seconds(program.read))
        # Values that nobody has used for an hour: those that were used just now aren't written over.
        for path in folder.rglob("*"):
            if path.is_file():
                os.utime(path, ns=(time.time_ns() - 3600 * 10**9,) * 2)
        _syncfs(folder)
        self._note("write full", side, _seconds(program.write) + _seconds(lambda: _syncfs(folder)))

    def _note(self, what: str, side: int, seconds: float) -> None:
        self._seconds.setdefault(f"{what} {self._label}", ([], []))[side].append(seconds)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
