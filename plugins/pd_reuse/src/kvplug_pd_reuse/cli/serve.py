"""The course of `kvplug pd up`, from the first line that it prints to its exit status."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import click
from rich.text import Text

from kvplug.cli.console import console
from kvplug_pd_reuse.cli.health import model_name
from kvplug_pd_reuse.cli.programs import Program
from kvplug_pd_reuse.cli.stack import AskedToEndError, ProgramError, stack

__all__ = ["serve"]


class _Failed(click.ClickException):
    """A program failed: one sentence, which the end of its log follows."""

    def __init__(self, error: ProgramError) -> None:
        super().__init__(str(error))
        self._error = error

    def show(self, file: IO[Any] | None = None) -> None:
        out = console(stderr=True)
        out.print(Text(f"Error: {self.message}", style="bold red"), soft_wrap=True)
        if self._error.cause is not None:
            out.print(f"The first error in its log: {self._error.cause}", markup=False, soft_wrap=True)
        end = "ends with" if self._error.lines else "is empty."
        out.print(f"Its log, {self._error.log}, {end}", markup=False, soft_wrap=True)
        for line in self._error.lines:
            out.print(Text(f"  {line}"), soft_wrap=True)


def serve(
    engines: Sequence[Program],
    router: Program,
    *,
    model: str,
    folder: Path | None,
    startup_timeout: float,
    shutdown_timeout: float,
    verbose: bool,
) -> None:
    """Run engines and a router until a signal comes.

    Args:
        engines: The one for prefill and the one for decode.
        router: What is in front of them.
        model: The model, as it was asked for.
        folder: Where logs go; None for a new folder.
        startup_timeout: Seconds that the engines may take to start, and then the router.
        shutdown_timeout: Seconds that running requests get to finish, and then the engines to end.
        verbose: Print what they print, too.

    Raises:
        click.ClickException: One of them failed.
        SystemExit: A signal came while they were starting.

    """
    folder = _folder(folder)
    serving = False
    try:
        with stack(folder, shutdown_timeout, verbose=verbose) as programs:
            for program in engines:
                _say(f"Starting {program.title.lower()} on {program.url}.")
                programs.start(program)
            _say(f"Logs are in {folder}.")
            programs.wait_until_ready(engines, startup_timeout)
            programs.start(router)
            programs.wait_until_ready([router], startup_timeout)
            _say_ready(router.url, model_name(engines[0].url) or model)
            serving = True
            try:
                programs.watch()
            except AskedToEndError:
                _say("Stopping. Running requests get time to finish; a second signal ends them.")
                raise
    except ProgramError as error:
        raise _Failed(error) from None
    except AskedToEndError as error:
        if not serving:
            sys.exit(128 + error.number)
        _say("Stopped.")


def _folder(folder: Path | None) -> Path:
    try:
        if folder is None:
            return Path(tempfile.mkdtemp(prefix="kvplug-pd-"))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"Logs can't go to {folder} ({error.strerror}): choose --log-dir.") from None
    return folder


def _say_ready(url: str, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 16})
    _say(f"\nServing {model} on {url}. Try:\n")
    _say(f"  curl {url}/v1/completions -H 'Content-Type: application/json' \\\n       -d {shlex.quote(body)}\n")
    _say(f"Stop with Ctrl-C, or with kill {os.getpid()}.")


def _say(text: str) -> None:
    console().print(text, markup=False, soft_wrap=True)
