"""What `kvplug-hooks` does to the files of a vLLM: each operation looks at all there is, and only then changes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvplug_hooks.deliver.apply import applied_goal, refuse, why_not_importable
from kvplug_hooks.deliver.files import Files
from kvplug_hooks.deliver.goal import Goal
from kvplug_hooks.deliver.lock import exclusive
from kvplug_hooks.deliver.manifest import FOLDER
from kvplug_hooks.deliver.report import Report, report
from kvplug_hooks.deliver.revert import reverted_goal
from kvplug_hooks.deliver.states import DeliveryError, Exit, from_os_error
from kvplug_hooks.deliver.survey import Survey, check_selection, survey
from kvplug_hooks.deliver.target import Target, find
from kvplug_hooks.deliver.unified import unified
from kvplug_hooks.deliver.verify import problems
from kvplug_hooks.registry import OWN, Registry, load, own_patches

__all__ = ["LOCK_TIMEOUT", "Vllm", "known_patches"]

#: Seconds to wait for another kvplug-hooks.
LOCK_TIMEOUT = 60.0


@dataclass(frozen=True)
class Vllm:
    """One vLLM and what is asked about it."""

    target: Target
    #: All patches that there are, and declarations that can't be used.
    registry: Registry
    #: Ids of those in question; None for those that were asked for when this vLLM was patched, or else all.
    selection: tuple[str, ...] | None = None
    #: Architectures of the models that will be served; None for any.
    architectures: tuple[str, ...] | None = None
    #: Whether a patch that isn't needed counts as missing.
    require: bool = False
    #: Seconds to wait for others who change it.
    timeout: float = LOCK_TIMEOUT

    @classmethod
    def of(
        cls,
        python: str | Path | None = None,
        *,
        patches: Collection[str] | None = None,
        architectures: Collection[str] | None = None,
        require: bool = False,
    ) -> Vllm:
        """Ask an interpreter for its vLLM.

        Raises:
            DeliveryError: It has none whose files could be patched, or there is no patch of such a name.

        """
        registry = known_patches()
        selection = tuple(patches) if patches else None
        check_selection(registry.patches, selection)
        packages = tuple(sorted({patch.import_from.partition(".")[0] for patch in registry.patches}))
        return cls(
            target=find(python, packages),
            registry=registry,
            selection=selection,
            architectures=None if architectures is None else tuple(architectures),
            require=require,
        )

    def status(self) -> Report:
        """Say where each patch stands, by the files. Nothing is changed."""
        with self._reading():
            found = self._survey()
            reason = why_not_importable(found, "applied")
            return self._report(found, (reason,) if reason else ())

    def verify(self) -> Report:
        """Say the same, and check what is around the patched modules. Nothing is changed."""
        with self._reading():
            found = self._survey()
            return self._report(found, tuple(problems(found)))

    def diff(self) -> bytes:
        """Return what patching changes, or has changed, as a unified diff."""
        with self._reading():
            found = self._survey()
            self._refuse(found)
            goal = applied_goal(found)
            return b"".join(unified(name, found.tree.read(name).data, data) for name, data in goal.after.items())

    def apply(self) -> Report:
        """Put the patches into the files, each exactly once.

        Raises:
            DeliveryError: It can't be done; nothing was changed.

        """
        if self.selection is None:
            # Not just what was asked for before: there may be patches that weren't known then.
            return replace(self, selection=tuple(patch.id for patch in self.registry.patches)).apply()

        def goal() -> Goal:
            found = self._survey()
            self._refuse(found)
            return applied_goal(found)

        return self._reach(goal, f"The vLLM in {self.target.tree.folder} can't be patched")

    def revert(self) -> Report:
        """Take the patches out of the files again.

        Raises:
            DeliveryError: It can't be done; nothing was changed.

        """
        doing = f"The vLLM in {self.target.tree.folder} can't be reverted"
        done = self._reach(lambda: reverted_goal(Files.of(self.target), self.registry.patches, self.selection), doing)
        if left := [one.path for one in done.patches if one.state == "applied" and not done.changed]:
            raise DeliveryError(
                f"{' and '.join(filter(None, left))} has a patch that `kvplug-hooks apply` has no record of; take it "
                "out the way it was put in (`patch -R`, for example), or reinstall vLLM.",
                Exit.DRIFTED,
            )
        return done

    def _reach(self, work_out: Callable[[], Goal], doing: str) -> Report:
        folder = self.target.tree.folder
        try:
            while True:
                goal = work_out()
                if not goal.reached or (goal.manifest is None and (folder / FOLDER).exists()):
                    with exclusive(folder, self.timeout):
                        # Somebody else may have been here while this one waited.
                        goal = goal if goal.still_holds() else work_out()
                        if not goal.reached:
                            goal.reach(doing)
                        return replace(self.status(), changed=goal.changed)
                done = self.status()
                if goal.still_holds():
                    return done
        except OSError as error:
            raise from_os_error(error, doing) from error

    def _refuse(self, found: Survey) -> None:
        refuse(found, require=self.require)
        if self.require and self.registry.rejected:
            reasons = " ".join(one.reason for one in self.registry.rejected)
            raise DeliveryError(f"{reasons} Or leave out --require.", Exit.UNSUPPORTED)

    def _report(self, found: Survey, problems: tuple[str, ...]) -> Report:
        rejected = tuple(one.reason for one in self.registry.rejected)
        return report(found, require=self.require, problems=problems, rejected=rejected)

    def _survey(self) -> Survey:
        while True:
            files = Files.of(self.target)
            found = survey(files, self.registry.patches, self.selection, self.architectures)
            # Somebody else may be at work. Each operation changes the manifest or RECORD.
            if Files.of(self.target) == files:
                return found

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DeliveryError(
                f"The vLLM in {self.target.tree.folder} can't be read ({error.filename}: {error.strerror}); run "
                "kvplug-hooks as a user who may.",
                Exit.FAILED,
            ) from error


def known_patches() -> Registry:
    """Return all patches that there are; those of this distribution, where kvplug was uninstalled beside it."""
    try:
        return load()
    except ModuleNotFoundError as error:
        # Without kvplug a patched vLLM doesn't start, and `kvplug-hooks revert` is the remedy.
        if error.name is None or error.name.partition(".")[0] != "kvplug":
            raise
    registry = Registry()
    registry.add(own_patches(), OWN)
    return registry
