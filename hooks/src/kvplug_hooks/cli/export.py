"""`kvplug-hooks export`: the hook as a diff."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.version import InvalidVersion, Version

from kvplug_hooks.cli.errors import said
from kvplug_hooks.export import export
from kvplug_hooks.patches.before_update_states import BY_RUNNER

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["export_command"]


def _release(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Version | None:
    if value is None:
        return None
    try:
        # A local part, as in 0.32.0+cpu, says how vLLM was built, not what its source is.
        return Version(Version(value).public)
    except InvalidVersion as error:
        raise click.BadParameter(f"{value!r} isn't a vLLM version such as 0.32.0.") from error


@click.command("export")
@click.option(
    "--vllm", "version", callback=_release, metavar="VERSION", help="The release to patch. Default: the installed one."
)
@click.option(
    "--runner",
    type=click.Choice([*BY_RUNNER, "both"]),
    default="both",
    show_default=True,
    help="The model runner to patch; both means those that can have connectors in this release.",
)
@click.option(
    "--source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder that contains the release's vllm package, for releases that kvplug-hooks has no record of.",
)
def export_command(version: Version | None, runner: str, source: Path | None) -> None:
    """Print the hook as a unified diff, for `patch -p1` or `git apply` in the folder that contains vllm."""
    patches: list[Patch] = list(BY_RUNNER.values()) if runner == "both" else [BY_RUNNER[runner]]
    with said():
        result = export(patches, version, source)
    for patch in result.left_out:
        click.echo(f"Left out: {patch.id}, which is for vLLM {patch.releases}.", err=True)
    click.echo(f"{result.added_lines} added lines, for {result.basis}.", err=True)
    click.echo(result.text.encode(), nl=False)
