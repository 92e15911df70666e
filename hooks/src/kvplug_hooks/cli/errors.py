"""Errors on the command line: one sentence and an exit status, and never a traceback for what is a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import click

from kvplug_hooks.deliver.states import DeliveryError, Exit
from kvplug_hooks.errors import PatchError, UnsupportedError

__all__ = ["code_of", "said"]


@contextmanager
def said(*, as_json: bool = False) -> Iterator[None]:
    """End the command with the sentence and the exit status of a refusal.

    Args:
        as_json: Whether to print it as a JSON object on standard output.

    """
    try:
        yield
    except UnsupportedError as error:
        code = code_of(error)
        if as_json:
            click.echo(json.dumps({"state": code.word, "code": int(code), "error": str(error)}, indent=1))
        raise _Refusal(str(error), int(code)) from error


class _Refusal(click.ClickException):
    """Ends the command with its message and an exit status of its own."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]  # click reads the instance's


def code_of(error: Exception) -> Exit:
    """Return the exit status for a refusal."""
    if isinstance(error, DeliveryError):
        return error.code
    return Exit.UNSUPPORTED if isinstance(error, PatchError) else Exit.FAILED
