"""vLLM's router as a test sees it: a real `vllm-router` in front of servers that are there already."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.processes import HOST, LAUNCHER, free_ports, stop_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Lines of the router's log that an error shows.
_SHOWN_LINES = 60


class RouterError(AssertionError):
    """The router did not start, ended, or didn't answer. The message has the end of its log."""


class Router:
    """A running router on the loopback interface."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self._log = log
        #: TCP port that it listens on.
        self.port = port

    @property
    def log(self) -> str:
        """What it has printed so far, with colours."""
        return self._log.read_text(errors="replace")

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 120.0) -> tuple[int, str]:
        """Return status and body of the answer to a POST request."""
        with self.open(path, body, timeout) as answer:
            return answer.status, answer.read().decode()

    def complete(self, prompt: Sequence[int], max_tokens: int = 8, **request: Any) -> dict[str, Any]:
        """Return the one choice of a greedy completion of `max_tokens` tokens.

        Args:
            prompt: Token ids.
            max_tokens: Tokens to generate.
            **request: Further fields of the request.

        Raises:
            RouterError: the answer's status is not 200.
        """
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        status, text = self.post("/v1/completions", body | request)
        if status != http.client.OK:
            raise self.error(f"a completion was answered with {status}: {text}")
        choice: dict[str, Any] = json.loads(text)["choices"][0]
        return choice

    @contextlib.contextmanager
    def open(self, path: str, body: Mapping[str, Any], timeout: float = 120.0) -> Iterator[http.client.HTTPResponse]:
        """Give the answer to a POST request, to be read as it comes; leaving the context breaks the connection.

        Raises:
            RouterError: there is no answer.
        """
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self.error(f"no answer to POST {path}: {error!r}") from error
        try:
            yield answer
        finally:
            # Only both break it: the answer has a file of its own on the socket.
            answer.close()
            connection.close()

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the router says that it is.

        Raises:
            RouterError: it ended, or took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self.error(f"the router ended with status {self._process.returncode} while starting")
            connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("GET", "/readiness")
                if connection.getresponse().status == http.client.OK:
                    return
            time.sleep(0.05)
        raise self.error(f"the router was not ready in {timeout:.0f} s")

    def error(self, problem: str) -> RouterError:
        """Return an error that shows the end of the log."""
        tail = "\n".join(self.log.splitlines()[-_SHOWN_LINES:])
        return RouterError(f"{problem}\n--- the router's log ends with\n{tail}")

    def stop(self, timeout: float = 5.0) -> None:
        """Ask the router to end, and kill what is left of its process group. Running requests may keep it waiting."""
        stop_group(self._process, timeout)


@contextlib.contextmanager
def route(
    prefill_ports: Sequence[int | str],
    decode_ports: Sequence[int | str],
    *,
    args: Sequence[str] = (),
    timeout: float = 60.0,
) -> Iterator[Router]:
    """Start ``vllm-router`` in front of servers on the loopback interface, and stop it at the end.

    Args:
        prefill_ports: Ports of the servers that prefill, which answer ``/health`` already. Or ``host:port``: the router
            takes no address twice, so one that is to do both goes by another name here.
        decode_ports: The same of those that decode.
        args: Further arguments; they win over those of here.
        timeout: Seconds that the start may take.

    Raises:
        RouterError: the router did not start.
    """
    port, metrics_port = free_ports(2)
    command = [str(Path(sys.executable).with_name("vllm-router")), "--vllm-pd-disaggregation"]
    for kind, ports in (("--prefill", prefill_ports), ("--decode", decode_ports)):
        for server in ports:
            command += [kind, f"http://{server}" if isinstance(server, str) else f"http://{HOST}:{server}"]
    command += ["--kv-connector", "nixl", "--policy", "round_robin", "--host", HOST, "--port", str(port)]
    # Its default port may be another router's, which would end this one.
    command += ["--prometheus-port", str(metrics_port), *args]
    with tempfile.TemporaryDirectory(prefix="kvplug-router-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, *command],
                env=os.environ | {"NO_PROXY": f"{HOST},localhost", "no_proxy": f"{HOST},localhost"},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is pytest's, which then stops the router
            )
        router = Router(process, port, log)
        try:
            router.wait_until_ready(timeout)
            yield router
        finally:
            router.stop()
