"""`kvplug list`: the connectors that are installed, and those that are skipped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from kvplug.cli.ask import TIMEOUT, Answer, ask
from kvplug.cli.console import console, working
from kvplug.cli.environment import vllm_install
from kvplug.discovery import ConnectorEntry, Discovery, SkippedEntry, discover

__all__ = ["by_reason", "list_connectors"]


@click.command("list", short_help="List installed and skipped connectors.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-load", is_flag=True, help="Read metadata only; don't import vLLM and the connectors.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=TIMEOUT, show_default=True, help="Seconds to wait for vLLM."
)
def list_connectors(*, as_json: bool, no_load: bool, timeout: float) -> None:
    """List connectors: where they come from, whether they need the hook, and which are skipped, and why.

    vLLM and the connectors are imported in a subprocess, which takes some seconds.
    """
    found = discover()
    answer = Answer()
    if not no_load and vllm_install() is None:
        answer.error = "vLLM isn't installed in this environment, so no connector can be loaded."
    elif not no_load:
        with working("Importing vLLM and the connectors…"):
            answer = ask("vllm", "autoload", "connectors", timeout=timeout)
    listing = _listing(found, answer)
    if as_json:
        click.echo(json.dumps(listing, indent=2))
    else:
        _print(listing)


def _listing(found: Discovery, answer: Answer) -> dict[str, Any]:
    """Put together what metadata and vLLM say."""
    autoload = answer.parts.get("autoload", {})
    vllm_names = autoload.get("vllm_names", [])
    # vLLM's own names win, which only a process that imports vLLM can tell.
    taken = [skipped for skipped in autoload.get("skipped", []) if skipped["name"] in vllm_names]
    vllm = answer.parts.get("vllm", {})
    return {
        "connectors": [
            _row(entry, answer.connectors.get(entry.value)) for entry in found.entries if entry.name not in vllm_names
        ],
        "skipped": [asdict(skipped) for skipped in found.skipped] + taken,
        "vllm": {"version": vllm.get("version"), "connectors": vllm_names} if vllm else None,
        "error": answer.error or vllm.get("error") or autoload.get("error"),
    }


def _row(entry: ConnectorEntry, loaded: dict[str, Any] | None) -> dict[str, Any]:
    """Describe one connector; what isn't known without loading it is None."""
    hooks = None if loaded is None else loaded["hooks"]
    return {
        **asdict(entry),
        "value": entry.value,
        "hooks": hooks,
        "needs_hook": None if hooks is None else bool(hooks),
        "error": None if loaded is None else loaded["error"],
    }


def _print(listing: dict[str, Any]) -> None:
    out = console()
    if listing["connectors"]:
        table = _table("Connector", "Distribution", "Version", "Hook", "From")
        for row in listing["connectors"]:
            table.add_row(
                row["name"] + (" (its class's name)" if row["implied"] else ""),
                row["distribution"],
                row["version"],
                _hook(row),
                row["location"] + (" (editable)" if row["editable"] else ""),
            )
        out.print(table)
    else:
        out.print("No connector is installed: pip install one, for example kvplug-type1.", markup=False)
    # By value: all names of a class fail alike.
    if broken := {row["value"]: row["error"] for row in listing["connectors"] if row["error"]}:
        table = _table("Can't be loaded", "Why")
        for value, error in broken.items():
            table.add_row(value, error)
        out.print()
        out.print(table)
    if listing["skipped"]:
        table = _table("Skipped", "Distribution", "Why")
        for entry, who in by_reason(SkippedEntry(**row) for row in listing["skipped"]):
            table.add_row(entry.name or "?", who, entry.reason)
        out.print()
        out.print(table)
    out.print()
    if listing["vllm"] and listing["vllm"]["connectors"]:
        names = ", ".join(listing["vllm"]["connectors"])
        out.print(f"vLLM {listing['vllm']['version']} has these by itself: {names}", markup=False)
    if listing["error"]:
        out.print(f"What needs vLLM is missing above. {listing['error']}", markup=False)


def by_reason(skipped: Iterable[SkippedEntry]) -> list[tuple[SkippedEntry, str]]:
    """Put together what was skipped under one name for one reason.

    Returns:
        One of the entries each, and the distributions that they are from.

    """
    same: dict[tuple[str, str], list[SkippedEntry]] = {}
    for entry in skipped:
        same.setdefault((entry.name, entry.reason), []).append(entry)
    return [
        (entries[0], " and ".join(f"{entry.distribution} {entry.version}".strip() for entry in entries))
        for entries in same.values()
    ]


def _hook(row: dict[str, Any]) -> Text:
    if row["error"]:
        return Text("can't be loaded", style="red")
    if row["needs_hook"] is None:
        return Text("not asked", style="dim")
    return Text("needed" if row["needs_hook"] else "not needed")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # A name that is cut in two can't be copied; the last column has what can be long.
        table.add_column(column, overflow="fold", no_wrap=column != columns[-1])
    return table
