"""Replaces files as a whole: whoever reads one gets the old bytes or the new ones, whenever this process ends.

The new bytes go into a new file in the same folder, which then takes the old one's name. So nothing is written through
a hard link or a symbolic link: installers share files between environments and their cache with both.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from kvplug_hooks.deliver.states import DeliveryError, Exit

__all__ = ["Look", "Staged", "leftover", "look_of", "remove", "stage", "sync_folder", "write"]

_SUFFIX = ".kvplug-hooks-new"


@dataclass(frozen=True)
class Look:
    """What a file has beside its bytes."""

    mode: int
    uid: int
    gid: int
    #: Seconds; what takes the file's place gets a later time.
    modified: float = 0.0


@dataclass(frozen=True)
class Staged:
    """A file that is complete, and has yet to take its name."""

    temporary: Path
    path: Path

    def commit(self) -> None:
        """Let the file take its name, for good."""
        os.replace(self.temporary, self.path)  # noqa: PTH105 - this very call is the point
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the file; fine if it has taken its name, or is gone."""
        remove(self.temporary)


def look_of(path: Path) -> Look:
    """Return mode, owner and time of a file.

    Where it's a link into a package cache, the mode is that of the file, and the owner that of the link: the file
    belongs to whoever owns the cache.
    """
    file, link = path.stat(), path.lstat()
    return Look(stat.S_IMODE(file.st_mode), link.st_uid, link.st_gid, file.st_mtime)


def leftover(path: Path) -> Path:
    """Return where a file waits to become `path`. Only an operation that was interrupted leaves one there."""
    return path.with_name(f".{path.name}{_SUFFIX}")


def stage(path: Path, data: bytes, look: Look) -> Staged:
    """Write the file that is to become `path`, down to the disk.

    Only one process may do this for a path at a time.

    Raises:
        DeliveryError: The owner can't be kept.
        OSError: The file can't be written; nothing is left of it.

    """
    staged = Staged(leftover(path), path)
    staged.discard()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(staged.temporary, flags, 0o600)
    try:
        try:
            _write_all(descriptor, data)
            _dress(descriptor, path, look)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        staged.discard()
        raise
    return staged


def write(path: Path, data: bytes, look: Look) -> None:
    """Replace a file, or make it."""
    staged = stage(path, data, look)
    try:
        staged.commit()
    except BaseException:
        staged.discard()
        raise


def remove(path: Path) -> bool:
    """Remove a file or a link; return whether there was one."""
    try:
        os.unlink(path)  # noqa: PTH108 - beside the other calls of its kind
    except FileNotFoundError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Have the names in a folder written to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        # File systems that can't do this for folders say so with these.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _dress(descriptor: int, path: Path, look: Look) -> None:
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (look.uid, look.gid):
        try:
            os.fchown(descriptor, look.uid, look.gid)
        except PermissionError as error:
            raise DeliveryError(
                f"{path} belongs to user {look.uid} and group {look.gid}, which can't be kept when it is replaced; run "
                "kvplug-hooks as that user, or as root.",
                Exit.READ_ONLY,
            ) from error
    # Last: a change of owner can clear bits of the mode.
    os.fchmod(descriptor, look.mode)
    # Python tells stale bytecode by the source's size and second. A reader that saw the old file's times and the new
    # one's bytes must not leave bytecode that a later file could fit.
    now = max(time.time(), int(look.modified) + 1)
    with contextlib.suppress(OSError):
        os.utime(descriptor, (now, now))
