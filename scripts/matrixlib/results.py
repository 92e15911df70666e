"""Finds out whether the hook works in a release."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from kvplug_hooks.errors import PatchError
from kvplug_hooks.installed import Tree
from kvplug_hooks.matrix import Row
from kvplug_hooks.patch import Patch
from kvplug_hooks.patches.before_update_states import BY_RUNNER
from kvplug_hooks.plan import plan, rewrite
from kvplug_hooks.source import SourceText
from matrixlib import sources
from matrixlib.contract import contract
from matrixlib.harness import patched, run
from matrixlib.reading import Missing, Sources

__all__ = ["all_rows", "known_releases", "rows_of"]


def known_releases() -> tuple[str, ...]:
    """Return the releases that the hook is declared for, the oldest first."""
    return max((patch.known_releases for patch in BY_RUNNER.values()), key=len)


def all_rows(releases: Iterable[str]) -> list[Row]:
    """Return the rows of all these releases, whose sources are there, on all cores."""
    # Not forked: the processes that call this have threads.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return [row for rows in pool.map(rows_of, releases) for row in rows]


def rows_of(release: str) -> list[Row]:
    """Return a row for each runner that takes connectors in a release.

    Raises:
        SourcesError: There are no sources.

    """
    read = Sources(sources.fetch(release))
    patches = {runner: patch for runner, patch in BY_RUNNER.items() if release in patch.known_releases}
    # Syntax trees are many small objects that live until the end: looking for garbage among them takes half the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        problems = contract(read, tuple(patches))
        return [_row(read, runner, patch, problems[runner]) for runner, patch in patches.items()]
    finally:
        if enabled:
            gc.enable()


def _row(read: Sources, runner: str, patch: Patch, problems: list[str]) -> Row:
    tree = read.tree
    try:
        anchors = len(patch.anchor.find(read.function(patch.path, patch.function)))
    except Missing:
        anchors = 0
    text, failures = _rewritten(tree, patch)
    if text is not None:
        failures = _failures(tree, runner, patch, text)
    return Row(
        release=str(tree.version),
        runner=runner,
        anchor_count=anchors,
        added_lines=0 if text is None else len(text.lines) - len(tree.source(patch).lines),
        contract=not problems,
        runs=not failures,
        reason=" ".join([*problems, *failures]),
    )


def _rewritten(tree: Tree, patch: Patch) -> tuple[SourceText | None, list[str]]:
    """Return the patched file, or what keeps it from being patched."""
    try:
        planned = plan(tree, [patch])
        texts = rewrite(tree, planned)
    except PatchError as error:
        return None, [str(error)]
    text = next(iter(texts.values()), None)
    if text is None:
        return None, [planned[0].reason]
    rest = iter(text.lines)
    if not all(line in rest for line in tree.source(patch).lines):
        return None, [f"The patch changes lines of {patch.path}."]
    return text, []


def _failures(tree: Tree, runner: str, patch: Patch, text: SourceText) -> list[str]:
    """Return what goes wrong when the patched runner runs, whichever way it is patched."""
    failures = []
    try:
        for way, code in patched(tree, patch, text).items():
            problem = run(tree, patch, runner, code)
            if problem is not None:
                failures.append(f"Patched at {way}: {problem}.")
    except PatchError as error:
        failures.append(str(error))
    return failures
