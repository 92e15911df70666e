"""The demo's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from demolib.text import MAX_CONVERSATIONS, MAX_TURNS

__all__ = ["read_options"]


def read_options(arguments: Sequence[str] | None, out: Path) -> argparse.Namespace:
    """Read the demo's options.

    Args:
        arguments: The command line; None for the process's own.
        out: Default of the folder for files.

    """
    parser = argparse.ArgumentParser(
        prog="make demo ARGS=...",
        description="Serves conversations with vLLM and one of kvplug's connectors, measures the time to first token "
        "cold and warm, and compares every answer with vLLM alone. Exits with 1 if an answer differs or nothing was "
        "reused.",
    )
    parser.add_argument(
        "--conversations",
        type=int,
        default=3,
        choices=range(1, MAX_CONVERSATIONS + 1),
        metavar="N",
        help=f"conversations that share a system prompt, 1 to {MAX_CONVERSATIONS} (default 3)",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=4,
        choices=range(1, MAX_TURNS + 1),
        metavar="N",
        help=f"turns of each, 1 to {MAX_TURNS} (default 4)",
    )
    parser.add_argument(
        "--connector", default="type1", choices=("type1", "type2"), help="the connector to show (default type1)"
    )
    parser.add_argument(
        "--l2",
        choices=["disk"],
        help="also show that reuse survives a restart of the server, over this L2 tier",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the model's weights (default 0)")
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        choices=range(1 << 16),
        metavar="PORT",
        help="port of the server with the connector (default: any that is free)",
    )
    parser.add_argument(
        "--hook",
        default="import",
        choices=("import", "file"),
        help="how the hook gets into vLLM: as it is imported (default), or in the files of a copy made for the demo",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=out,
        metavar="DIR",
        help="folder for result.json, ttft.png and the servers' logs (default build/demo)",
    )
    options = parser.parse_args(arguments)
    if options.connector == "type2" and options.hook != "import":
        parser.error("--hook is for type1: type2 needs no hook")
    options.out = options.out.resolve()
    return options
