"""Changes several files so that each is the old or the new one at any moment, and all are the old ones if one fails.

If the process is killed in between, some files are new and others old. Each operation of kvplug-hooks looks at the
files themselves, so the next one completes, or undoes, what was begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvplug_hooks.deliver import bytecode
from kvplug_hooks.deliver.atomic import Look, Staged, remove, stage, sync_folder, write
from kvplug_hooks.deliver.states import DeliveryError, Exit, from_os_error

__all__ = ["Change", "change"]


@dataclass(frozen=True)
class Change:
    """What one file is to become."""

    path: Path
    #: The bytes now; None if there is no such file.
    before: bytes | None
    #: The bytes then; None if it is to go.
    after: bytes | None
    look: Look

    @property
    def is_module(self) -> bool:
        """Whether Python may have compiled the file."""
        return self.path.suffix == ".py"


def change(*stages: Sequence[Change], pycache_prefix: str | None, doing: str) -> None:
    """Make the changes, in their order.

    Args:
        stages: What is to be done. Nothing of a later stage is begun before the earlier one is done.
        pycache_prefix: The interpreter's folder of bytecode, if it has one.
        doing: How to say that it failed, as in `… can't be patched`.

    Raises:
        DeliveryError: The operating system refused something. All files are as they were.

    """
    done: list[Change] = []
    staged: dict[Path, Staged] = {}
    try:
        for changes in stages:
            # What needs space, or permissions, comes before the first of these files changes.
            for one in changes:
                if one.after is not None:
                    staged[one.path] = stage(one.path, one.after, one.look)
            for one in changes:
                # Before, so that no bytecode of the old file is there with the new one, not even for a moment.
                _drop_bytecode(one, pycache_prefix)
                done.append(one)
                if one.after is None:
                    remove(one.path)
                    sync_folder(one.path.parent)
                else:
                    staged[one.path].commit()
                # And after, since another process may have imported the old file in that moment.
                _drop_bytecode(one, pycache_prefix)
        for one in done:
            _read_back(one)
    except BaseException as error:
        _undo(done, list(staged.values()), pycache_prefix, doing)
        if isinstance(error, OSError):
            raise from_os_error(error, doing) from error
        raise


def _drop_bytecode(one: Change, prefix: str | None) -> None:
    if one.is_module:
        bytecode.drop(one.path, prefix)


def _read_back(one: Change) -> None:
    """See that the file is what it was to become: some file systems say so and lie."""
    found = one.path.read_bytes() if one.path.exists() else None
    if found != one.after:
        raise DeliveryError(f"{one.path} isn't what was just written to it; check its file system.", Exit.FAILED)


def _undo(done: list[Change], staged: list[Staged], prefix: str | None, doing: str) -> None:
    try:
        for file in staged:
            file.discard()
        for one in reversed(done):
            if one.before is None:
                remove(one.path)
            elif not one.path.exists() or one.path.read_bytes() != one.before:
                write(one.path, one.before, one.look)
            _drop_bytecode(one, prefix)
    except OSError as error:
        raise DeliveryError(
            f"{doing}, and the files that had changed could not all be put back "
            f"({error.filename}: {error.strerror}); run `kvplug-hooks revert` once that is mended.",
            Exit.FAILED,
        ) from error
