"""`kvplug pd up` as a process: real router, stand-in engines. What is told, and that nothing is ever left behind.

The engines are a package named vllm that comes first on the path. Each has a child that ignores SIGTERM and stays when
its parent is gone, as an engine core may.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

ENGINE = r"""
import argparse, json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for name in ("model", "host", "port", "kv-transfer-config", "served-model-name", "end-with", "answer-after"):
    parser.add_argument(f"--{name}")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--stubborn", action="store_true")
options = parser.parse_args()

if options.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
subprocess.Popen([sys.executable, "-S", "-c", child])
print("this is engine", os.getpid(), flush=True)
if options.end_with:
    print("(Worker pid=1) ERROR 11-30 15:51:48 [executor.py:1063] Traceback (most recent call last):")
    print("(Worker pid=1) ERROR 11-30 15:51:48 [executor.py:1063] kvplug.errors.ConfigError: Setting 'x' is unknown.")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    for number in range(30):
        print("\x1b[31mline\x1b[0m", number)
    print('nanobind: leaked 30 types!\n' + ' - leaked type "T"\n' * 30 + " - ... skipped remainder")
    sys.exit(int(options.end_with))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.send({"data": [{"id": options.served_model_name or options.model}]}, 503 if options.never_ready else 200)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("this is a request", flush=True)
        time.sleep(float(options.answer_after or 0))
        seen = {"devices": os.environ.get("CUDA_VISIBLE_DEVICES"), "config": json.loads(options.kv_transfer_config)}
        self.send({"choices": [], "kv_transfer_params": {"from": options.port}, "body": body, "seen": seen})

    def send(self, answer, status=200):
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


ThreadingHTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""


class Command:
    """A running `kvplug pd up`."""

    def __init__(self, folder, arguments):
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "CUDA_"))}
        # A proxy that isn't there: nothing between command, router and engines may ask it.
        proxy = "http://127.0.0.1:1"
        environ |= {"PYTHONPATH": str(folder), "HTTP_PROXY": proxy, "http_proxy": proxy}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvplug.cli", "pd", "up", "--model", "org/model"),
                    *("--port", str(self.port), "--log-dir", str(folder / "logs"), *arguments),
                ],
                env=environ,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self):
        return (self.folder / "out").read_text()

    @property
    def err(self):
        return (self.folder / "err").read_text()

    def log(self, name):
        file = self.folder / "logs" / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def wait(self, condition, timeout=30):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.out + self.err
            time.sleep(0.02)

    def wait_until_ready(self):
        self.wait(lambda: "Stop with Ctrl-C" in self.out or self.process.poll() is not None)
        assert self.process.poll() is None, self.out + self.err

    def wait_until_engines_run(self):
        self.wait(lambda: all("this is engine" in self.log(name) for name in ("prefill", "decode")))

    def post(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            body = json.dumps({"model": "m", "prompt": "hello"})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def left(self):
        """Return the command lines of all processes that it started, and that still run, itself among them."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                # By the folder that they run in: the router's title is where its environment was.
                if folder.name.isdigit() and (folder / "cwd").readlink() == self.folder:
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def find(self, text):
        (pid,) = (pid for pid, command in self.left().items() if text in command)
        return pid

    def clean_up(self):
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def command(tmp_path):
    """Start the command: (arguments…) -> Command. Whatever a test leaves running is killed."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(ENGINE)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    started = []

    def start(*arguments):
        started.append(Command(tmp_path, arguments))
        return started[-1]

    yield start
    for one in started:
        one.clean_up()


def test_from_start_to_stop(command):
    """It says what it starts, what is ready and how to use it; requests go through both engines; SIGTERM stops all."""
    running = command(
        *("--prefill-devices", "0", "--decode-devices", "1", "--config", '{"model_id": "x"}'),
        *("--", "--served-model-name", "it's"),
    )
    running.wait_until_ready()
    status, answer = running.post()
    assert status == 200
    assert answer["body"]["kv_transfer_params"].keys() == {"from"}  # decode's request, with prefill's answer
    assert answer["seen"]["devices"] == "1"
    assert answer["seen"]["config"]["kv_connector"] == "PDReuseConnector"
    assert answer["seen"]["config"]["kv_connector_extra_config"] == {"model_id": "x"}
    # The engines and a child of each, the router, the command and its guard.
    assert len(running.left()) == 7
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(20) == 0
    assert running.left() == {}
    lines = running.out.splitlines()
    assert lines[0].startswith("Starting the prefill engine on http://127.0.0.1:")
    assert lines[1].startswith("Starting the decode engine on http://127.0.0.1:")
    assert lines[2] == f"Logs are in {running.folder / 'logs'}."
    assert {line.partition(" is ready after ")[0] for line in lines[3:6]} == {"prefill", "decode", "router"}
    assert f"Serving it's on http://127.0.0.1:{running.port}. Try:" in lines
    assert f"Stop with Ctrl-C, or with kill {running.process.pid}." in lines
    assert lines[-1] == "Stopped."
    assert not any("|" in line for line in lines)
    assert running.err == ""
    assert "Router ready" in running.log("router")


def test_the_example_works(command):
    """What is shown as an example is a request that can be sent, also for a name with a quote in it."""
    running = command("--", "--served-model-name", "it's")
    running.wait_until_ready()
    example = running.out.partition("Try:\n\n")[2].partition("\n\n")[0]
    # curl may be missing; the shell is not.
    script = f'curl() {{ for each in "$@"; do printf "%s\\n" "$each"; done; }}\n{example}'
    words = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:4] == [
        f"http://127.0.0.1:{running.port}/v1/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
    ]
    assert json.loads(words[4])["model"] == "it's"


def test_ctrl_c_lets_requests_finish(command):
    """A request that runs is answered, and then all end. With --verbose, lines of logs are printed with a prefix."""
    running = command("--verbose", "--decode-args", "--answer-after 1.5")
    running.wait_until_ready()
    answers = []
    client = threading.Thread(target=lambda: answers.append(running.post()[0]))
    client.start()
    running.wait(lambda: "this is a request" in running.log("decode"))
    running.process.send_signal(signal.SIGINT)
    client.join()
    assert answers == [200]
    assert running.process.wait(20) == 0
    assert running.left() == {}
    lines = running.out.splitlines()
    for name in ("prefill", "decode"):
        assert any(line.startswith(f"{name} | this is engine ") for line in lines)
    assert any(line.startswith("router | ") and "Received terminate signal" in line for line in lines)
    assert "\x1b" not in running.out
    assert lines[-1] == "Stopped."


def test_nothing_is_left_if_the_command_is_killed(command):
    """Nor are children of engines that ignore SIGTERM, and engines that do."""
    running = command("--shutdown-timeout", "1", "--decode-args=--stubborn")
    running.wait_until_ready()
    running.process.kill()
    running.wait(lambda: running.left() == {}, timeout=10)


def test_engines_end_if_the_guard_is_killed_with_the_command(command):
    """As `pkill -9` does that finds both. Engines are still told that the command is gone."""
    running = command("--", "--never-ready")
    running.wait_until_engines_run()
    os.kill(running.find("guard.py"), signal.SIGKILL)
    running.process.kill()
    running.wait(lambda: not any("api_server" in text for text in running.left().values()), timeout=10)


def test_an_engine_that_ends_while_it_starts(command):
    """One sentence says so; the error that was first and the end of its log follow; the others are stopped."""
    running = command("--decode-args", "--end-with 3", "--prefill-args=--never-ready")
    assert running.process.wait(20) == 1
    assert running.left() == {}
    lines = running.err.splitlines()
    assert lines[0] == "Error: The decode engine ended with exit status 3 while it was starting."
    assert lines[1] == "The first error in its log: kvplug.errors.ConfigError: Setting 'x' is unknown."
    assert lines[2] == f"Its log, {running.folder / 'logs' / 'decode.log'}, ends with"
    assert lines[3:] == [f"  line {number}" for number in range(10, 30)]
    assert running.log("router") == ""


@pytest.mark.parametrize(("name", "what"), [("prefill", "The prefill engine"), ("router", "The router")])
def test_one_that_dies_later(command, name, what):
    """The others are stopped, and it is said which it was."""
    running = command()
    running.wait_until_ready()
    text = "vllm::router" if name == "router" else f"--port {port_of(running, name)} "
    os.kill(running.find(text), signal.SIGKILL)
    assert running.process.wait(20) == 1
    assert running.left() == {}
    assert running.err.splitlines()[0] == f"Error: {what} ended with SIGKILL."
    assert f"{name}.log, ends with" in running.err


def port_of(running, name):
    return running.out.partition(f"Starting the {name} engine on http://127.0.0.1:")[2].partition(".\n")[0]


def test_a_signal_while_it_starts(command):
    """It ends as other programs do; an engine that ignores SIGTERM is killed after a while."""
    running = command("--shutdown-timeout", "0.5", "--", "--never-ready", "--stubborn")
    running.wait_until_engines_run()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(10) == 128 + signal.SIGTERM
    assert running.left() == {}


def test_a_second_signal_ends_it_at_once(command):
    """Who presses Ctrl-C twice doesn't want to wait."""
    running = command("--shutdown-timeout", "60", "--", "--never-ready", "--stubborn")
    running.wait_until_engines_run()
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(10) == 128 + signal.SIGINT
    assert running.left() == {}


def test_an_engine_that_is_never_ready(command):
    """The time for the start has an end, which is told with the option that changes it."""
    running = command("--startup-timeout", "1", "--prefill-args=--never-ready")
    assert running.process.wait(20) == 1
    assert running.left() == {}
    assert running.err.splitlines()[0] == (
        "Error: The prefill engine wasn't ready after 1 s: see why, or give it more with --startup-timeout."
    )
