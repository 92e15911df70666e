"""vLLM's OpenAI-compatible server, as the demo starts and stops it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from demolib.processes import exit_status, spawn

__all__ = ["Server", "ServerError", "free_port"]

_HOST = "127.0.0.1"
_LOG_LINES = 30


class ServerError(Exception):
    """A server did not start, ended, or answered with an error: one sentence, and the end of its log."""

    def __init__(self, sentence: str, log: str = "") -> None:
        super().__init__(sentence)
        #: The last lines of the server's log.
        self.log = log


class Server:
    """A server in processes of its own, on the loopback interface."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        #: Leader of the server's processes.
        self.process = process
        self._log = log
        #: TCP port.
        self.port = port

    @classmethod
    def start(cls, model: Path, port: int, log: Path, build: Path, *options: str, first: Path | None = None) -> Server:
        """Start a server, and return before it is ready.

        Args:
            model: The model's folder.
            port: TCP port for it.
            log: File for what it prints.
            build: Folder for vLLM's own files.
            *options: Further options of vLLM's.
            first: Folder that comes before all others on its path, with another vLLM in it.

        """
        # fmt: off
        arguments = [
            "-m", "vllm.entrypoints.openai.api_server",
            "--host", _HOST, "--port", str(port),
            "--model", str(model), "--served-model-name", "demo",
            "--dtype", "float32", "--enforce-eager", "--seed", "0",
            "--block-size", "32", "--max-model-len", "8192",
            "--disable-uvicorn-access-log",
            *options,
        ]
        # fmt: on
        with log.open("wb") as output:
            process = spawn(arguments, build, stdout=output, stderr=subprocess.STDOUT, first=first)
        return cls(process, port, log)

    @property
    def log(self) -> str:
        """What all of the server's processes have printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def is_ready(self) -> bool:
        """Say whether the server answers by now.

        Raises:
            ServerError: It has ended.

        """
        status = exit_status(self.process)
        if status is not None:
            raise self.error(f"The server ended with status {status} as it started.")
        with contextlib.suppress(ServerError):
            self._request("GET", "/health", timeout=5)
            return True
        return False

    def reset(self, *, store: bool) -> None:
        """Have vLLM forget its own prefix cache, and if `store`, the connector what it stored.

        Raises:
            ServerError: It didn't.

        """
        path = f"/reset_prefix_cache?reset_external={'true' if store else 'false'}"
        # Blocks of a request are given back shortly after its last token was sent.
        deadline = time.monotonic() + 10
        while not json.loads(self._request("POST", path))["success"]:
            if time.monotonic() > deadline:
                raise self.error("vLLM didn't reset its prefix cache.")
            time.sleep(0.02)

    def metric(self, name: str) -> int:
        """Return a counter's sum over its labels; 0 where it isn't there."""
        lines = self._request("GET", "/metrics").splitlines()
        samples = [line for line in lines if re.split(r"[{ ]", line, maxsplit=1)[0] == name]
        return round(sum(float(line.rpartition(" ")[2]) for line in samples))

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed chat completion, each as it comes.

        Raises:
            ServerError: The server answers with an error, or not at all.

        """
        with self._open("POST", "/v1/chat/completions", body, timeout=300) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if not data:
                    continue
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise self.error(f"The server answered with an error: {chunk['error']}.")
                yield chunk
        raise self.error("The server's answer has no end.")

    def _request(self, method: str, path: str, timeout: float = 60) -> str:
        with self._open(method, path, None, timeout) as answer:
            return answer.read().decode()

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=timeout)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {} if body is None else {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                text = answer.read().decode(errors="replace")
                raise self.error(f"{method} {path} was answered with status {answer.status}: {text}")
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise self.error(f"{method} {path} got no answer: {error!r}.") from error
        finally:
            connection.close()

    def error(self, sentence: str) -> ServerError:
        """Return an error that has the end of the log."""
        return ServerError(f"{sentence} Its log is {self._log}.", "\n".join(self.log.splitlines()[-_LOG_LINES:]))


def free_port(wanted: int = 0) -> int:
    """Return a TCP port that is free: any, or the wanted one.

    Raises:
        ServerError: The wanted one isn't.

    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, wanted))
        except OSError as error:
            raise ServerError(f"Port {wanted} can't be used ({error.strerror}): choose another with --port.") from error
        port: int = probe.getsockname()[1]
        return port
