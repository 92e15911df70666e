"""`kvplug pd up` as in the README: real engines and the real router with one command, on the default store."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.engines import base_environment
from support.reuse import prompt

pytestmark = [pytest.mark.engine, pytest.mark.server]

#: As a user would serve a small model on a CPU. The context is what the test's cache holds.
ENGINE = ("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "512")


def ask(port, path, body=None):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    assert answer.status == 200, text
    return text


def metric(port, name):
    samples = [line for line in ask(port, "/metrics").splitlines() if line.partition("{")[0] == name]
    return sum(float(line.rpartition(" ")[2]) for line in samples)


def free_ports(number):
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def test_one_command_serves(models, tmp_path):
    """Both engines and the router start, a prompt is handed over to the last token, and SIGTERM ends all of it."""
    port, prefill, decode = free_ports(3)
    environment = base_environment("v1") | {"KVPLUG_DISK_PATH": str(tmp_path / "store"), "KVPLUG_DISK_SIZE": "256MiB"}
    environment["KVPLUG_MIN_REUSE_TOKENS"] = "1"
    command = [sys.executable, "-m", "kvplug.cli", "pd", "up", "--model", models("llama"), "--log-dir", str(tmp_path)]
    command += ["--port", str(port), "--prefill-port", str(prefill), "--decode-port", str(decode), "--", *ENGINE]
    out = tmp_path / "out"
    with out.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 500
        while "Stop with Ctrl-C" not in out.read_text():
            assert process.poll() is None, out.read_text()
            assert time.monotonic() < deadline, out.read_text()
            time.sleep(0.2)
        body = {"model": models("llama"), "prompt": prompt(100, seed=1), "max_tokens": 4, "temperature": 0}
        first = json.loads(ask(port, "/v1/completions", body))["choices"][0]["text"]
        assert metric(decode, "vllm:kvplug_handovers_total") == 1
        assert metric(decode, "vllm:kvplug_handover_tokens_computed_total") == 1
        assert metric(prefill, "vllm:kvplug_handovers_total") == 0
        assert json.loads(ask(port, "/v1/completions", body))["choices"][0]["text"] == first
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, out.read_text()
    finally:
        process.kill()
        process.wait()
    assert not running(tmp_path), "something is left"


def running(folder):
    """Return the ids of processes that have a folder in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(folder).encode() in (entry / "environ").read_bytes():
                    found.append(entry.name)
    return found
