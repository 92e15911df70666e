"""A command group that installed distributions can add to."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import click

from kvplug.discovery import ConnectorEntry, discover

__all__ = ["COMMANDS", "PluginGroup"]

#: Entry-point group of further commands: the name is what is typed, the value names a `click.Command`.
COMMANDS = "kvplug.commands"


class PluginGroup(click.Group):
    """A group with its own commands and those of the entry-point group `kvplug.commands`.

    A command of an entry point is imported when it is asked for, or for its line of the help. One that is broken says
    so there, and the others work. None can take the name of a command that the group has itself.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *self._entries})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; one that can't be loaded is a command that says why."""
        command = super().get_command(ctx, cmd_name)
        entry = self._entries.get(cmd_name)
        return command if command is not None or entry is None else _load(entry)

    @functools.cached_property
    def _entries(self) -> dict[str, ConnectorEntry]:
        return {entry.name: entry for entry in discover(COMMANDS).entries}

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Name the commands that were skipped, below the help."""
        super().format_epilog(ctx, formatter)
        skipped = discover(COMMANDS).skipped
        if skipped:
            with formatter.section("Skipped commands"):
                formatter.write_dl(
                    [
                        (f"{entry.name or '?'} of {entry.distribution} {entry.version}", entry.reason)
                        for entry in skipped
                    ]
                )


def _load(entry: ConnectorEntry) -> click.Command:
    try:
        command: Any = functools.reduce(getattr, entry.attr.split("."), importlib.import_module(entry.module))
        if isinstance(command, click.Command):
            return command
        reason = f"{entry.value} is a {type(command).__name__}, not a click command"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin's; it is what the command says
        reason = f"{type(error).__name__}: {error}"

    def say_why() -> None:
        raise click.ClickException(
            f"The command {entry.name!r} of {entry.source} can't be loaded from {entry.value} ({reason}). "
            f"Update or uninstall {entry.distribution}."
        )

    return click.Command(
        entry.name,
        callback=say_why,
        short_help=f"(broken: {reason})",
        # Whatever follows it: the answer is the same.
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )
