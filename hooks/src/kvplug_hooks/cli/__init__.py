"""The `kvplug-hooks` command."""

from __future__ import annotations

import click

from kvplug_hooks import __version__
from kvplug_hooks.cli.export import export_command
from kvplug_hooks.cli.files import COMMANDS
from kvplug_hooks.cli.matrix import matrix_command

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Small patches of an installed vLLM, above all the hook that kvplug connectors need in its model runners.

    By default they are put in as vLLM imports its modules, and nothing here is needed. These commands put them into
    vLLM's files, for those who build images, and tell where they stand.
    """


for command in (export_command, *COMMANDS, matrix_command):
    main.add_command(command)
