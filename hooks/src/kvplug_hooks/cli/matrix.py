"""`kvplug-hooks matrix`: the releases in which the hook was shown to work."""

from __future__ import annotations

import json

import click

from kvplug_hooks.matrix import Row, recorded

__all__ = ["matrix_command"]

_COLUMNS = ("vLLM", "Runner", "Anchors", "Added lines", "Contract", "Runs", "Supported")


@click.command("matrix")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each release and runner.")
def matrix_command(*, as_json: bool) -> None:
    """Print for which vLLM releases, and which of their model runners, the hook was shown to work.

    The results come with this package. Other releases are judged by their source: see `kvplug-hooks status`.
    """
    matrix = recorded()
    if as_json:
        click.echo(json.dumps([row.as_json() for row in matrix.rows], indent=1))
        return
    lines = [_COLUMNS, *map(_cells, matrix.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    supported = sum(row.supported for row in matrix.rows)
    click.echo(f"\n{supported} of {len(matrix.rows)} supported, as of {matrix.day}.")
    for row in matrix.rows:
        if not row.supported:
            click.echo(f"{row.release} {row.runner}: {row.reason}")


def _cells(row: Row) -> tuple[str, ...]:
    answers = [("no", "yes")[answer] for answer in (row.contract, row.runs, row.supported)]
    return (row.release, row.runner, str(row.anchor_count), str(row.added_lines), *answers)
