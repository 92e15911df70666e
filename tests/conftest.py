"""Fixtures of the tests that cross distributions: real engines and tiny models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support import engines
from support.models import model_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


#: Tests of another vLLM, run by its own Python: `make test-0.19` names them.
collect_ignore = ["v019"]


@pytest.fixture(scope="session")
def models() -> Callable[[str], str]:
    """Return `support.models.model_path`: a tiny model's folder by its name."""
    return model_path


@pytest.fixture(scope="session")
def zygote() -> Iterator[Callable[..., Any]]:
    """Return `support.engines.run`; the processes behind it end with the session."""
    yield engines.run
    engines.stop_all()


@pytest.fixture(params=engines.RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    """Run the test once on each of vLLM's model runners."""
    name: str = request.param
    return name
