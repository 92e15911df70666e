"""vLLM's OpenAI-compatible server as a test sees it: front end, engine core and workers in processes of their own."""

from __future__ import annotations

import contextlib
import http.client
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
from support.processes import HOST, LAUNCHER, free_ports, stop_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Lines of the server's log that an error shows.
_SHOWN_LINES = 100


class ServerError(AssertionError):
    """The server did not start, ended, or answered with an error. The message has the end of its log."""


class Server:
    """A running server on the loopback interface."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self._log = log
        #: TCP port that it listens on.
        self.port = port

    @property
    def log(self) -> str:
        """What all of the server's processes have printed so far."""
        return self._log.read_text(errors="replace")

    def get(self, path: str, timeout: float = 60.0) -> str:
        """Return the body of a GET request.

        Raises:
            ServerError: the answer's status is not 200, or there is no answer.
        """
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 120.0) -> Any:
        """Return the answer to a POST request, decoded from JSON; None where it has no body.

        Raises:
            ServerError: the answer's status is not 200, or there is no answer.
        """
        answer = self._request("POST", path, body or {}, timeout)
        return json.loads(answer) if answer else None

    def complete(self, prompt: Sequence[int], max_tokens: int = 8, **request: Any) -> dict[str, Any]:
        """Return the one choice of a greedy completion of `max_tokens` tokens.

        Args:
            prompt: Token ids.
            max_tokens: Tokens to generate.
            **request: Further fields of the request.
        """
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        choice: dict[str, Any] = self.post("/v1/completions", body | request)["choices"][0]
        return choice

    def metric(self, name: str) -> float:
        """Return the sum of a Prometheus metric's samples over all labels; 0 where it has none."""
        samples = [line for line in self.get("/metrics").splitlines() if line.partition("{")[0].split(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in samples)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> str:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise self.error(f"no answer to {method} {path}: {error!r}") from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise self.error(f"{method} {path} answered {answer.status}: {text}")
        return text

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server answers its health check.

        Raises:
            ServerError: it ended, or took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self.error(f"the server ended with status {self._process.returncode} while starting")
            with contextlib.suppress(ServerError):
                self.get("/health", timeout=5)
                return
            time.sleep(0.25)
        raise self.error(f"the server did not start in {timeout:.0f} s")

    def error(self, problem: str) -> ServerError:
        """Return an error that shows the end of the log."""
        tail = "\n".join(self.log.splitlines()[-_SHOWN_LINES:])
        return ServerError(f"{problem}\n--- the server's log ends with\n{tail}")

    def kill(self) -> None:
        """Kill all of the server's processes (SIGKILL)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self, timeout: float = 20.0) -> None:
        """Ask the server to end, and kill what is left of its process group."""
        stop_group(self._process, timeout)


@contextlib.contextmanager
def serve(
    model: str,
    *,
    connector: Mapping[str, Any] | None = None,
    runner: str = "v1",
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    python: str = sys.executable,
    timeout: float = 600.0,
) -> Iterator[Server]:
    """Start ``python -m vllm.entrypoints.openai.api_server`` on a free port, and stop it at the end.

    The engine is eager and float32, has blocks of 32 tokens and 256 of them, and a context of 1,024 tokens.

    Args:
        model: Folder of the model. Requests may leave out the model's name.
        connector: vLLM's ``--kv-transfer-config``; None for a server without a connector.
        runner: vLLM's model runner, ``v1`` or ``v2``.
        env: Further environment variables.
        args: Further arguments; they win over those above.
        python: Interpreter to start, of an environment that has vLLM.
        timeout: Seconds that the start may take.

    Raises:
        ServerError: the server did not start.
    """
    environment = (
        base_environment(runner) | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_SERVER_DEV_MODE": "1"} | dict(env or {})
    )
    (port,) = free_ports(1)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(port)]
    command += [
        "--model",
        model,
        "--served-model-name",
        "model",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--seed",
        "0",
    ]
    command += ["--block-size", "32", "--num-gpu-blocks-override", "256", "--max-model-len", "1024"]
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(dict(connector))]
    with tempfile.TemporaryDirectory(prefix="kvplug-server-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, *command, *args],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is pytest's, which then stops the server
            )
        server = Server(process, port, log)
        try:
            server.wait_until_ready(timeout)
            yield server
        finally:
            server.stop()
