"""A pytest plugin: where CI=true, a skipped test is a failed test.

A test that skips because something is missing (a model, a library, a second runner) is right on a contributor's
machine. On CI, where everything is there on purpose, it would hide that nothing was tested. Tests that really need
what CI can't have are marked ``may_skip_in_ci("why")``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    import pluggy

_MARKER = "may_skip_in_ci"


def _forbidden() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: skipped under CI=true ({reason}); mark it {_MARKER}(reason) if that is right"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pluggy.Result[pytest.TestReport], None]:
    """Turn a test's skip into a failure, unless its marker allows it; an expected failure is not a skip."""
    report = (yield).get_result()
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure and _forbidden() and item.get_closest_marker(_MARKER) is None:
        _fail(report)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Generator[None, pluggy.Result[pytest.CollectReport], None]:
    """Turn the skip of a whole module, as by ``pytest.importorskip``, into an error of its collection."""
    report = (yield).get_result()
    if report.skipped and _forbidden():
        _fail(report)
