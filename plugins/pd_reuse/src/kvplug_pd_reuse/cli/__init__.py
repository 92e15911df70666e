"""`kvplug pd`: commands for split prefill and decode. Like all of kvplug's, they import neither torch nor vLLM."""

from __future__ import annotations

import click

from kvplug_pd_reuse.cli.up import up as up_command

__all__ = ["pd"]


@click.group(commands=[up_command], short_help="Split prefill and decode on this machine.")
def pd() -> None:
    """Split prefill and decode: one engine prefills, another one decodes, and a router is in front of them."""
