"""`kvplug pd up`: a prefill engine, a decode engine and a router on one machine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from kvplug_pd_reuse.cli.ports import LOOPBACK, take, within_url
from kvplug_pd_reuse.cli.programs import check_arguments, check_installed, engine, router
from kvplug_pd_reuse.cli.serve import serve

__all__ = ["up"]

_PORT = click.IntRange(1, 65535)
_SECONDS = click.FloatRange(min=0)
_FOLDER = click.Path(path_type=Path, file_okay=False)


class _Up(click.Command):
    """A command that says where options of vLLM go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            said = error.format_message()
            end = "" if said.endswith((".", ")")) else "."
            raise click.UsageError(f"{said}{end} Options of vLLM come after `--`.", ctx) from None


def _own_arguments(_ctx: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    try:
        arguments = shlex.split(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}: quote it as a shell wants it.") from None
    check_arguments(arguments)
    return arguments


def _arguments(_ctx: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> list[str]:
    if value and not value[0].startswith("-"):
        raise click.UsageError(
            f"Unexpected argument {value[0]!r}: name the model with --model, and give options of vLLM after `--`."
        )
    check_arguments(value)
    return list(value)


def _settings(_ctx: click.Context, _parameter: click.Parameter, value: str) -> dict[str, Any]:
    try:
        settings = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}: give a JSON object in single quotes.") from None
    if not isinstance(settings, dict):
        raise click.BadParameter("it is not a JSON object: give one in single quotes.")
    return settings


@click.command(cls=_Up, short_help="Start a prefill engine, a decode engine and a router.")
@click.option("--model", required=True, help="Name or path of the model, as vLLM takes it.")
@click.option("--host", default=LOOPBACK, show_default=True, help="Where the router listens.")
@click.option("--port", type=_PORT, default=8000, show_default=True, help="Port of the router.")
@click.option("--prefill-port", type=_PORT, show_default="a free one", help="Port of the prefill engine.")
@click.option("--decode-port", type=_PORT, show_default="a free one", help="Port of the decode engine.")
@click.option("--prefill-devices", metavar="LIST", help="CUDA_VISIBLE_DEVICES of the prefill engine.")
@click.option("--decode-devices", metavar="LIST", help="CUDA_VISIBLE_DEVICES of the decode engine.")
@click.option("--prefill-args", metavar="ARGS", default="", callback=_own_arguments, help="Options of vLLM for it.")
@click.option("--decode-args", metavar="ARGS", default="", callback=_own_arguments, help="Options of vLLM for it.")
@click.option("--config", metavar="JSON", default="{}", callback=_settings, help="Settings of the connector.")
@click.option("--log-dir", type=_FOLDER, show_default="a new one", help="Folder for the logs.")
@click.option("--verbose", is_flag=True, help="Print what goes to the logs, too.")
@click.option("--startup-timeout", type=_SECONDS, default=1800, show_default=True, help="Seconds for the start.")
@click.option(
    "--shutdown-timeout",
    type=_SECONDS,
    default=20,
    show_default=True,
    help="Seconds for running requests to finish, and then for the engines to end.",
)
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]", callback=_arguments)
def up(
    *,
    model: str,
    host: str,
    port: int,
    prefill_port: int | None,
    decode_port: int | None,
    prefill_devices: str | None,
    decode_devices: str | None,
    prefill_args: list[str],
    decode_args: list[str],
    config: dict[str, Any],
    log_dir: Path | None,
    verbose: bool,
    startup_timeout: float,
    shutdown_timeout: float,
    engine_args: list[str],
) -> None:
    """Start an engine that prefills, one that decodes, and a router in front of them, on this machine.

    What follows `--` goes to both engines, as options of vLLM:

    \b
      kvplug pd up --model M -- --max-model-len 8192

    GPUs are neither looked for nor divided. Both engines see the same ones unless --prefill-devices and
    --decode-devices say which is whose. On one GPU, say how much memory each takes for KV:

    \b
      -- --gpu-memory-utilization 0.4 --kv-cache-memory-bytes 8G

    Ctrl-C or SIGTERM stops all three; the exit status is then 0. It is 1 if one of them fails.
    """  # noqa: D301 - click's mark for a paragraph that isn't wrapped
    file = check_installed()
    ports = take(
        {
            "--port": (host, port),
            "--prefill-port": (LOOPBACK, prefill_port),
            "--decode-port": (LOOPBACK, decode_port),
            "metrics": (LOOPBACK, None),
        }
    )
    url = f"http://{within_url(host)}:{port}"
    engines = [
        engine(name, model=model, port=ports[f"--{name}-port"], arguments=own, devices=devices, settings=config)
        for name, own, devices in (
            ("prefill", [*engine_args, *prefill_args], prefill_devices),
            ("decode", [*engine_args, *decode_args], decode_devices),
        )
    ]
    front = router(
        file,
        host=host,
        url=url,
        prefill_port=ports["--prefill-port"],
        decode_port=ports["--decode-port"],
        metrics_port=ports["metrics"],
    )
    serve(
        engines,
        front,
        model=model,
        folder=log_dir,
        startup_timeout=startup_timeout,
        shutdown_timeout=shutdown_timeout,
        verbose=verbose,
    )
