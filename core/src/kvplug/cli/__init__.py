"""The `kvplug` command. Its own process imports neither torch nor vLLM nor a connector."""

from __future__ import annotations

import click

from kvplug import __version__
from kvplug.cli.doctor import doctor as doctor_command
from kvplug.cli.group import PluginGroup
from kvplug.cli.listing import list_connectors

__all__ = ["main"]


@click.group(
    cls=PluginGroup,
    commands=[list_connectors, doctor_command],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="kvplug")
def main() -> None:
    """KV-cache connectors for vLLM as installable parts."""
