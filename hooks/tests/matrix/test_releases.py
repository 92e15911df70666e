"""The hook in every release that it is for: sources read, patched, and run up to the state update."""

from __future__ import annotations

import pytest
from matrixlib import sources
from matrixlib.results import all_rows, known_releases

from kvplug_hooks.matrix import Row, dump, recorded
from kvplug_hooks.patches.before_update_states import BY_RUNNER

pytestmark = pytest.mark.install

PAIRS = [
    (release, runner)
    for release in known_releases()
    for runner, patch in BY_RUNNER.items()
    if release in patch.known_releases
]


@pytest.fixture(scope="module")
def rows():
    """What is found now, by release and runner."""
    try:
        sources.prefetch(known_releases())
        found = all_rows(known_releases())
    except sources.SourcesError as error:
        pytest.skip(str(error))
    return {(row.release, row.runner): row for row in found}


@pytest.mark.parametrize(("release", "runner"), PAIRS)
def test_h10_the_hook_works_in_this_release(rows, release, runner):
    """H10: one anchor, two added lines, every fact as declared, and hooks see the same step as everywhere."""
    row = rows[release, runner]
    assert row.supported, row.reason
    assert row == Row(release, runner, anchor_count=1, added_lines=2, contract=True, runs=True)


def test_the_recorded_matrix_is_what_is_found_now(rows):
    """What `kvplug-hooks matrix` prints can't be out of date: `make matrix` renews it."""
    assert recorded().rows == tuple(rows[pair] for pair in PAIRS)
    assert len(PAIRS) == 42
    assert dump(recorded().day, recorded().rows) == dump(recorded().day, rows.values())
