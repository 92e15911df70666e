"""`kvplug pd up` as a test sees it: one command that runs two real servers and a real router."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.engines import base_environment
from support.processes import free_ports
from support.servers import Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["up"]

#: The engines of `support.servers.serve`.
_ENGINE = (
    *("--served-model-name", "model", "--dtype", "float32", "--enforce-eager", "--seed", "0"),
    *("--block-size", "32", "--num-gpu-blocks-override", "256", "--max-model-len", "1024"),
)


@contextlib.contextmanager
def up(
    model: str, settings: Mapping[str, Any], *, args: Sequence[str] = (), timeout: float = 600.0
) -> Iterator[tuple[Server, Server, Server]]:
    """Run the command, and stop it at the end with SIGTERM: it has to end well, and to leave nothing behind.

    Args:
        model: Folder of the model.
        settings: Of the connector.
        args: Further arguments of both engines.
        timeout: Seconds that the start may take.

    Yields:
        The prefill engine, the decode engine and the router.

    Raises:
        AssertionError: It did not start, did not end well, or left something behind.

    """
    ports = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="kvplug-up-") as folder:
        log = Path(folder) / "out"
        command = [sys.executable, "-m", "kvplug.cli", "pd", "up", "--model", model, "--config", json.dumps(settings)]
        for option, port in zip(("--prefill-port", "--decode-port", "--port"), ports, strict=True):
            command += [option, str(port)]
        command += ["--log-dir", folder, "--", *_ENGINE, *args]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=base_environment("v1") | {"VLLM_LOGGING_LEVEL": "INFO"},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        prefill, decode, router = (Server(process, port, log) for port in ports)
        try:
            deadline = time.monotonic() + timeout
            while "Stop with Ctrl-C" not in router.log:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise router.error("kvplug pd up did not start")
                time.sleep(0.2)
            yield prefill, decode, router
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                raise router.error(f"kvplug pd up ended with {process.returncode}")
        finally:
            process.kill()
            process.wait()
        if left := _running_in(folder):
            raise router.error(f"kvplug pd up left processes: {left}")


def _running_in(folder: str) -> list[str]:
    """Return the command lines of processes that were started in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and (entry / "cwd").resolve() == Path(folder):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found
