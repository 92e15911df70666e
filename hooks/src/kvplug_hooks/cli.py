"""The `kvplug-hooks` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.version import InvalidVersion, Version

from kvplug.errors import KvplugError
from kvplug_hooks import __version__
from kvplug_hooks.check import check
from kvplug_hooks.export import export
from kvplug_hooks.installed import installed
from kvplug_hooks.patches import all_patches
from kvplug_hooks.patches.before_update_states import BY_RUNNER

if TYPE_CHECKING:
    from kvplug_hooks.patch import Patch

__all__ = ["main"]


def _release(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Version | None:
    if value is None:
        return None
    try:
        # A local part, as in 0.32.0+cpu, says how vLLM was built, not what its source is.
        return Version(Version(value).public)
    except InvalidVersion as error:
        raise click.BadParameter(f"{value!r} isn't a vLLM version such as 0.32.0.") from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """The two-line hook that kvplug connectors need in vLLM's model runners."""


@main.command("export")
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
    try:
        result = export(patches, version, source)
    except KvplugError as error:
        raise click.ClickException(str(error)) from error
    for patch in result.left_out:
        click.echo(f"Left out: {patch.id}, which is for vLLM {patch.releases}.", err=True)
    click.echo(f"{result.added_lines} added lines, for {result.basis}.", err=True)
    click.echo(result.text.encode(), nl=False)


@main.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(*, as_json: bool) -> None:
    """Tell whether the hook fits the installed vLLM, from its source; exit with 1 if it doesn't."""
    tree = installed()
    if tree is None:
        raise click.ClickException("No vLLM is installed here; install one, or use this one's interpreter.")
    checks = check(all_patches(), tree)
    version = str(tree.version) if tree.version else None
    if as_json:
        click.echo(json.dumps({"vllm": version, "folder": str(tree.folder), "patches": [asdict(c) for c in checks]}))
    else:
        click.echo(f"vLLM {version or 'of unknown version'} in {tree.folder}")
        for entry in checks:
            click.echo(f"{entry.patch}: {entry.state}. {entry.reason}")
    sys.exit(0 if all(entry.ok for entry in checks) else 1)


if __name__ == "__main__":
    main()
