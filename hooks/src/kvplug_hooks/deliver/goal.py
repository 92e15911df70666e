"""What the files of one vLLM are to become, and the changes that this takes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvplug_hooks.deliver.atomic import Look, leftover, look_of, remove
from kvplug_hooks.deliver.files import File, Files
from kvplug_hooks.deliver.manifest import Manifest, manifest_path
from kvplug_hooks.deliver.states import DeliveryError
from kvplug_hooks.deliver.transaction import Change, change

__all__ = ["Goal"]


@dataclass(frozen=True)
class Goal:
    """What is wanted, and what was there when that was worked out."""

    files: Files
    #: The modules in question as they were, by name.
    before: Mapping[str, File]
    #: The same modules as they are to be.
    after: Mapping[str, bytes]
    #: The manifest as it is to be; None if none is to be left.
    manifest: Manifest | None

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the modules that change."""
        return tuple(name for name, data in self.after.items() if data != self.before[name].data)

    @property
    def reached(self) -> bool:
        """Whether there is nothing to do."""
        return not any(self._stages()) and not self._leftovers()

    def still_holds(self) -> bool:
        """Whether everything is as it was when the goal was set."""
        now = Files.of(self.files.target)
        return now == self.files and all(now.file(name) == file for name, file in self.before.items())

    def reach(self, doing: str) -> None:
        """Make the changes. Only whoever has the lock may do this.

        Args:
            doing: How to say that it failed, as in `… can't be patched`.

        Raises:
            DeliveryError: It can't be done; nothing was changed.

        """
        for path in self._leftovers():
            remove(path)
        target = self.files.target
        modules = [self.before[name].path for name in self.changed]
        compiled = [path for path in modules if target.has_bytecode(path)]
        change(*self._stages(), pycache_prefix=target.pycache_prefix, doing=doing)
        # Where the folder can't be written to when vLLM runs, its processes would compile the module each time. They
        # can, so it's no failure if it isn't done here.
        with contextlib.suppress(DeliveryError):
            target.compile(compiled)

    def _stages(self) -> list[list[Change]]:
        modules = [
            Change(self.before[name].path, self.before[name].data, self.after[name], look_of(self.before[name].path))
            for name in self.changed
        ]
        files, manifest = [*modules, *self._record()], self._manifest()
        # The manifest tells of each file that is patched, or that waits to be, at any moment.
        return [files, manifest] if self.manifest is None else [manifest, files]

    def _record(self) -> list[Change]:
        old = self.files.record
        if old is None:
            return []
        record = old
        before = self.files.manifest.files if self.files.manifest else {}
        then = self.manifest.files if self.manifest else {}
        for name, data in self.after.items():
            if record.vouches_for(name, data) is not False:
                continue
            restored = before[name].record_line if name in before and name not in then else None
            record = record.with_file(name, data) if restored is None else record.with_line(name, restored)
        return [] if record == old else [Change(old.path, old.data, record.data, look_of(old.path))]

    def _manifest(self) -> list[Change]:
        old, new = self.files.manifest, self.manifest
        if old is not None and new is not None and replace(new, kvplug_hooks=old.kvplug_hooks) == old:
            return []
        if old is None and new is None:
            return []
        folder = self.files.target.tree.folder
        # As readable as the package, and whoever may write beside the package may change it.
        package, around = look_of(folder / "vllm" / "__init__.py"), look_of(folder)
        look = Look(package.mode & 0o666, around.uid, around.gid)
        path = manifest_path(folder)
        return [Change(path, path.read_bytes() if old is not None else None, new.dump() if new else None, look)]

    def _leftovers(self) -> list[Path]:
        folder = self.files.target.tree.folder
        names = {*self.after, *(self.files.manifest.files if self.files.manifest else ())}
        paths = [manifest_path(folder), *(folder / name for name in sorted(names))]
        if self.files.record is not None:
            paths.append(self.files.record.path)
        return [path for path in map(leftover, paths) if path.is_symlink() or path.exists()]
