"""What the tests of the disk tier share: tiers of so many blocks, and looks at the directory of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

from kvplug.store.l2.disk import DiskTier
from kvplug.store.l2.disk.layout import overhead, reserved
from kvplug.store.l2.disk.ledger import ledger_bytes

#: Bytes of a block in most of these tests, and its memory.
BLOCK = 16 << 10
TIMEOUT = 10.0


def size_for(blocks: int, block: int = BLOCK) -> int:
    """Return the disk_size of a directory of one shard that holds so many blocks."""
    return overhead(1, ledger_bytes(1)) + blocks * reserved(block)


def new_tier(root: Path, blocks: int = 10, *, block: int = BLOCK, direct: bool = False) -> DiskTier:
    """Open a tier for so many blocks."""
    settings = DiskTier.Settings(disk_path=root, disk_size=size_for(blocks, block), disk_direct=direct)
    tier = DiskTier(settings)
    tier.open(max_value_bytes=block, timeout=TIMEOUT)
    return tier


def keys(number: int, prefix: bytes = b"key") -> list[bytes]:
    """Return so many keys."""
    return [b"%s %04d" % (prefix, index) for index in range(number)]


def content(key: bytes, length: int = BLOCK) -> bytes:
    """Return what is stored under a key."""
    return (key * (length // len(key) + 1))[:length]


def put(tier: DiskTier, *keys: bytes, length: int = BLOCK) -> list[bool]:
    """Put the contents of keys."""
    return list(tier.put(keys, [memoryview(content(key, length)) for key in keys], TIMEOUT))


def get(tier: DiskTier, key: bytes, length: int = BLOCK) -> bytes | None:
    """Read a value."""
    buffer = memoryview(bytearray(length))
    (found,) = tier.get([key], [buffer], TIMEOUT)
    return None if found is None else bytes(buffer[:found])


def held(tier: DiskTier, *keys: bytes) -> list[bytes]:
    """Return which of the keys are there."""
    return [key for key in keys if tier.exists([key], TIMEOUT)[0]]


def on_disk(root: Path) -> int:
    """Return the bytes that a directory takes, as `du` counts them, while others change it."""
    total = 0
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            with suppress(FileNotFoundError):
                total += path.lstat().st_blocks * 512
    return total


def value_files(root: Path) -> list[Path]:
    """Return the files of values."""
    return [path for path in root.glob("kvplug-disk-1/values-*/*/*") if path.is_file()]


def temporary_files(root: Path) -> list[Path]:
    """Return what is in the directory of temporary files."""
    return list(root.glob("kvplug-disk-1/temporary/*"))


def value_file(root: Path, key: bytes) -> Path:
    """Return a value's file."""
    (path,) = root.glob(f"kvplug-disk-1/values-*/*/{key.hex()}")
    return path


def descriptors() -> int:
    """Count this process's open descriptors."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def start(program: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a Python program in a process of its own, which can import this module."""
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
    command = [*prefix, sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(program: str, *arguments: object, prefix: tuple[str, ...] = ()) -> str:
    """Run a Python program in a process of its own, and return what it prints."""
    process = start(program, *arguments, prefix=prefix)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    return output
