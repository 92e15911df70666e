"""One patcher at a time: a lock for each vLLM, beside the package, that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvplug_hooks.deliver.atomic import sync_folder
from kvplug_hooks.deliver.manifest import FOLDER, manifest_path
from kvplug_hooks.deliver.states import DeliveryError, Exit

__all__ = ["exclusive"]

_NAME = "lock"
_PAUSE = 0.05


@contextlib.contextmanager
def exclusive(folder: Path, timeout: float) -> Iterator[None]:
    """Be the only one who changes the vLLM in `folder`, whatever user the others are.

    Where no manifest stands when this ends, nothing of the lock stays behind.

    Args:
        folder: The folder that contains the package.
        timeout: Seconds to wait for others.

    Raises:
        DeliveryError: Others took too long, or this file system has no locks.
        OSError: This user can't write here.

    """
    path = folder / FOLDER / _NAME
    deadline = time.monotonic() + timeout
    while (descriptor := _try(path)) is None:
        if time.monotonic() > deadline:
            raise DeliveryError(
                f"Another kvplug-hooks is at work on the vLLM in {folder}, and didn't end within {timeout:g} s; "
                "wait for it, and try again.",
                Exit.BUSY,
            )
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        if not manifest_path(folder).exists():
            # While it is held: whoever waits for it sees that the name is gone, and starts over.
            with contextlib.suppress(OSError):
                path.unlink()
                path.parent.rmdir()
        os.close(descriptor)


def _try(path: Path) -> int | None:
    """Return the descriptor that holds the lock, or None if it can't be had now."""
    descriptor = _open(path)
    if descriptor is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(path, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.ENOSYS):
            raise DeliveryError(
                f"{path} can't be locked ({error.strerror}); put vLLM on a file system that has locks, or see to it "
                "that nobody else patches it, and use `kvplug-hooks export` with `patch`.",
                Exit.FAILED,
            ) from error
        raise
    os.close(descriptor)
    return None


def _open(path: Path) -> int | None:
    """Open the lock, and make it if need be, as accessible as the folder that it is in."""
    flags = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        # On network file systems an exclusive lock needs a file that is open for writing.
        return os.open(path, os.O_RDWR | flags)
    except FileNotFoundError:
        pass
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags)
    _make_folder(path.parent)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o644)
    except (FileExistsError, FileNotFoundError):
        return None  # others make it, or clean up, right now
    _open_up(path.parent.parent, path, folder=False)
    return descriptor


def _make_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        _open_up(folder.parent, folder, folder=True)
        sync_folder(folder.parent)


def _open_up(model: Path, path: Path, *, folder: bool) -> None:
    """Give what was just made the owner and the mode of the folder that contains the package."""
    status = model.stat()
    # Whoever may write there may make this anew, so it's no harm if it is gone again.
    with contextlib.suppress(FileNotFoundError):
        if os.geteuid() == 0:
            os.chown(path, status.st_uid, status.st_gid)
        path.chmod(stat.S_IMODE(status.st_mode) & (0o777 if folder else 0o666))


def _is(path: Path, descriptor: int) -> bool:
    """Return whether the name still stands for the file that was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
