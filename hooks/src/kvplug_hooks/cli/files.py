"""`kvplug-hooks apply`, `status`, `verify`, `diff` and `revert`: patches in the files of a vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click

from kvplug_hooks.cli.errors import said
from kvplug_hooks.deliver import Exit, Report, Vllm

__all__ = ["COMMANDS"]

_STATUSES = """
\b
Exit status:
   0  applied: all patches that this vLLM needs are in its files
   1  the operating system refused something
   2  the command line is wrong
   3  absent: a patch that is needed isn't there
   4  drifted: somebody else changed a file, or put a patch in
   5  unsupported: this vLLM can't be patched
   6  not needed: this vLLM, or these models, need none of the patches
   7  conflict: two patches want one place
   8  another kvplug-hooks is at work on this vLLM
   9  read-only: this user can't change the files
  10  there is no vLLM
  11  incomplete: the files are patched, and something beside them is wrong
"""

_OPTIONS = (
    click.option(
        "--python",
        metavar="PATH",
        help="The interpreter that runs vLLM, or its environment's folder. Default: the one that runs this command.",
    ),
    click.option(
        "--patch",
        "patches",
        multiple=True,
        metavar="ID",
        help="A patch in question; may be repeated. Default: those applied before, or else all.",
    ),
)
_JUDGING = (
    click.option(
        "--architecture",
        "architectures",
        multiple=True,
        metavar="NAME",
        help="An architecture that will be served, as in a model's config.json; may be repeated. Patches that concern "
        "other models only are skipped.",
    ),
    click.option("--require", is_flag=True, help="Fail where a patch in question isn't needed, rather than skip it."),
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_Command = Callable[..., None]


def _command(*options: Callable[[_Command], _Command]) -> Callable[[_Command], click.Command]:
    def make(function: _Command) -> click.Command:
        for option in reversed(options):
            function = option(function)
        name = function.__name__.removesuffix("_command")
        return click.command(name, epilog=_STATUSES)(function)

    return make


@_command(*_OPTIONS, *_JUDGING, _JSON)
def apply_command(*, as_json: bool, **question: Any) -> None:
    """Put patches into vLLM's files, each exactly once, or change nothing.

    Each file is replaced as a whole, so that one that is shared with other environments stays as it is there.
    """
    with said(as_json=as_json):
        done = _vllm(**question).apply()
    # A patch that isn't needed is as good as one that is there, unless --require says otherwise.
    _end(done, Exit.APPLIED if done.code == Exit.NOT_NEEDED else done.code, as_json=as_json)


@_command(*_OPTIONS, *_JUDGING, _JSON)
def status_command(*, as_json: bool, **question: Any) -> None:
    """Say where each patch stands in vLLM's files, and why. Nothing is changed."""
    with said(as_json=as_json):
        found = _vllm(**question).status()
    _end(found, found.code, as_json=as_json)


@_command(*_OPTIONS, *_JUDGING, _JSON)
def verify_command(*, as_json: bool, **question: Any) -> None:
    """Say the same as status, and check RECORD, bytecode and what the patches import. Nothing is changed."""
    with said(as_json=as_json):
        found = _vllm(**question).verify()
    _end(found, found.code, as_json=as_json)


@_command(*_OPTIONS, _JSON)
def revert_command(*, as_json: bool, **question: Any) -> None:
    """Take patches out of vLLM's files again, which then are what they were, to the byte."""
    with said(as_json=as_json):
        done = _vllm(**question).revert()
    _end(done, Exit.APPLIED, as_json=as_json)


@_command(*_OPTIONS, *_JUDGING)
def diff_command(**question: Any) -> None:
    """Print what apply changes, or has changed, as a unified diff. Nothing is changed."""
    with said():
        vllm = _vllm(**question)
        text = vllm.diff()
        skipped = [one for one in vllm.status().patches if one.state in ("not needed", "not concerned")]
    for one in skipped:
        click.echo(f"Left out: {one.patch}, which is {one.state}. {one.reason}", err=True)
    click.echo(text, nl=False)


COMMANDS = (apply_command, status_command, verify_command, revert_command, diff_command)


def _vllm(
    *,
    python: str | None,
    patches: tuple[str, ...],
    architectures: tuple[str, ...] = (),
    require: bool = False,
) -> Vllm:
    return Vllm.of(python, patches=patches or None, architectures=architectures or None, require=require)


def _end(found: Report, code: Exit, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        shared = ", which other environments may use, too" if found.shared else ""
        click.echo(f"vLLM {found.vllm} ({found.distribution}) in {found.folder}{shared}")
        for one in found.patches:
            click.echo(f"{one.patch}: {one.state}. {one.reason}")
        if code == Exit.ABSENT and not found.applied:
            click.echo("What is absent from the files is put in as vLLM imports them, which `kvplug doctor` tries.")
        for problem in found.problems:
            click.echo(f"problem: {problem}")
        for reason in found.rejected:
            click.echo(f"not used: {reason}")
        if found.changed:
            click.echo(f"Changed: {', '.join(found.changed)}.")
    sys.exit(int(code))
