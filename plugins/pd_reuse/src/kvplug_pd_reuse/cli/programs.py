"""What `kvplug pd up` starts: three command lines and their environments. What can't work is refused here."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvplug_pd_reuse.cli.ports import LOOPBACK

__all__ = ["Program", "check_arguments", "check_installed", "engine", "router"]

_CONNECTOR = "PDReuseConnector"

# Options of an engine that are this command's to give, and what to say instead.
_OURS = {
    "--model": "give --model before `--`",
    "--host": f"engines listen on {LOOPBACK} only, and --host before `--` is the router's",
    "--port": "use --prefill-port and --decode-port",
    "--kv-transfer-config": "give settings of the connector with --config",
    "--api-key": "the router doesn't pass a client's key on, so have keys checked in front of it",
}


@dataclass(frozen=True)
class Program:
    """A program to start."""

    #: What its lines and its log are called.
    name: str
    #: What a sentence calls it.
    title: str
    #: The program's file, and its arguments.
    command: Sequence[str]
    #: Its whole environment.
    environ: Mapping[str, str]
    #: Where it is asked from here.
    url: str
    #: The path there that is answered with status 200 as soon as it is ready.
    ready: str


def check_installed() -> Path:
    """Return the router's file.

    Raises:
        click.ClickException: vLLM or the router is missing, or can't work together.

    """
    if importlib.util.find_spec("vllm") is None:
        raise click.ClickException(
            f"vLLM isn't installed in this environment ({sys.executable}): install it here, or run the kvplug command "
            "of the environment that has it."
        )
    if os.environ.get("VLLM_API_KEY"):
        raise click.ClickException(f"VLLM_API_KEY is set: unset it, because {_OURS['--api-key']}.")
    beside = shutil.which("vllm-router", path=sysconfig.get_path("scripts"))
    found = beside or shutil.which("vllm-router")
    if found is None:
        raise click.ClickException('The router isn\'t installed: pip install "kvplug-pd-reuse[router]".')
    return Path(found)


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments of an engine that would change what the router relies on.

    Raises:
        click.UsageError: There is one.

    """
    for argument in arguments:
        # As vLLM reads it: `--kv_transfer_config.kv_role=…` is that option, too.
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in _OURS:
            raise click.UsageError(f"{name} can't be given to the engines: {_OURS[name]}.")


def engine(
    name: str,
    *,
    model: str,
    port: int,
    arguments: Sequence[str],
    devices: str | None,
    settings: Mapping[str, Any],
) -> Program:
    """Return vLLM's server as one of the two engines.

    Args:
        name: `prefill` or `decode`.
        model: As vLLM takes it.
        port: Where it listens.
        arguments: Further arguments.
        devices: The value of `CUDA_VISIBLE_DEVICES`; None leaves that variable alone.
        settings: Of the connector.

    """
    config: dict[str, Any] = {"kv_connector": _CONNECTOR, "kv_role": "kv_both"}
    if settings:
        config["kv_connector_extra_config"] = dict(settings)
    # fmt: off
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments,
        "--model", model, "--host", LOOPBACK, "--port", str(port), "--kv-transfer-config", json.dumps(config),
    ]
    # fmt: on
    environ = {
        **os.environ,
        "PYTHONSAFEPATH": "1",  # like the `vllm` command, without the current folder on the path
        "PYTHONUNBUFFERED": "1",
    }
    if devices is not None:
        environ["CUDA_VISIBLE_DEVICES"] = devices
    return Program(name, f"The {name} engine", command, environ, f"http://{LOOPBACK}:{port}", "/health")


def router(file: Path, *, host: str, url: str, prefill_port: int, decode_port: int, metrics_port: int) -> Program:
    """Return the router in front of both engines.

    Args:
        file: The program.
        host: Where it listens.
        url: The same, as it is asked from here, with the port.
        prefill_port: Port of the engine that prefills.
        decode_port: Port of the engine that decodes.
        metrics_port: Port for its own metrics, which it wants in any case.

    """
    # fmt: off
    command = [
        str(file), "--vllm-pd-disaggregation",
        "--prefill", f"http://{LOOPBACK}:{prefill_port}", "--decode", f"http://{LOOPBACK}:{decode_port}",
        "--kv-connector", "nixl", "--policy", "round_robin",
        "--host", host, "--port", url.rpartition(":")[2], "--prometheus-port", str(metrics_port),
    ]
    # fmt: on
    # It would ask a proxy for the engines.
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOOPBACK]))
    environ = {**os.environ, "NO_PROXY": direct, "no_proxy": direct}
    return Program("router", "The router", command, environ, url, "/readiness")
