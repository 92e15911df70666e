"""The command line asks a subprocess, which may print, crash or hang."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from kvplug.cli import ask as module
from kvplug.cli.ask import TIMEOUT, ask

PRELUDE = """
import json, os, signal, sys, time
request = json.loads(sys.argv[1])
def say(**line): print("kvplug-probe: " + json.dumps(line), flush=True)
"""


@pytest.fixture
def probe(monkeypatch):
    """Replace the probe by a script."""

    def replace(script):
        monkeypatch.setattr(module, "_PROBE", ("-c", PRELUDE + script))

    return replace


def test_noise_on_standard_output_is_ignored(probe):
    """Lines that aren't the probe's, before, between and behind on the same line, don't matter."""
    probe("""
print("WARNING 12:00 kvplug-prob: {")
sys.stdout.write("no newline before ")
say(part="vllm", version="1")
print("{}")
say(part="settings", value="m:C", error=None, values={})
""")
    answer = ask("vllm")
    assert answer.error is None
    assert answer.parts == {"vllm": {"version": "1"}}
    assert answer.settings == {"m:C": {"error": None, "values": {}}}


def test_a_crash_keeps_what_was_said_before(probe):
    """The error says how the process ended, what it was doing and what it logged last."""
    probe("""
say(part="vllm", version="1")
say(part="doing", what="runners")
print("about to fall over", file=sys.stderr, flush=True)
os.write(1, b'kvplug-probe: {"part": "auto')
os.kill(os.getpid(), signal.SIGSEGV)
""")
    answer = ask("vllm", "runners")
    assert answer.parts == {"vllm": {"version": "1"}}
    assert answer.error == "Asking vLLM (runners) ended with SIGSEGV: about to fall over"


def test_g5_a_connector_that_ends_the_process_is_left_out(probe):
    """It is noted as broken, and asked again without it, only for what wasn't answered yet."""
    probe("""
print(sorted(request["skip"]), request["parts"], file=sys.stderr)
say(part="vllm", version="1")
for value in ("a:A", "b:B", "c:C"):
    if value not in request["skip"]:
        say(part="doing", what="connector", connector=value)
        if value == "b:B": os._exit(7)
        if value == "c:C": os.abort()
        say(part="connector", value=value, error=None, hooks=[])
assert request["parts"] == ["connectors"], request["parts"]
""")
    answer = ask("vllm", "connectors")
    assert answer.error is None
    assert answer.connectors["a:A"] == {"error": None, "hooks": []}
    assert "ended with exit status 7" in answer.connectors["b:B"]["error"]
    assert "ended with SIGABRT" in answer.connectors["c:C"]["error"]


def test_a_probe_that_hangs_is_ended_with_its_children(probe, tmp_path):
    """After the time-out neither the process nor what it started lives on."""
    heartbeat = tmp_path / "heartbeat"
    probe(f"""
say(part="vllm", version="1")
say(part="doing", what="model")
if os.fork() == 0:
    while True:
        open({str(heartbeat)!r}, "a").write("x"); time.sleep(0.05)
while True: time.sleep(1)
""")
    answer = ask("vllm", "model", timeout=5)
    assert answer.parts == {"vllm": {"version": "1"}}
    assert answer.error == "Asking vLLM (model) took longer than 5 s."
    beats = heartbeat.stat().st_size
    time.sleep(0.5)
    assert heartbeat.stat().st_size == beats


def test_a_probe_ends_with_the_command(probe, tmp_path):
    """SIGTERM, as from a health check's time limit, leaves no process behind, and is taken as ever afterwards."""
    heartbeat = tmp_path / "heartbeat"
    probe(f"""
os.kill(os.getppid(), signal.SIGTERM)
while True:
    open({str(heartbeat)!r}, "a").write("x"); time.sleep(0.05)
""")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        ask("vllm", timeout=60)
    beats = heartbeat.stat().st_size if heartbeat.exists() else 0
    time.sleep(0.5)
    assert (heartbeat.stat().st_size if heartbeat.exists() else 0) == beats
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_python_that_says_nothing(probe):
    """No answer at all is an error too."""
    probe("sys.exit(4)")
    assert ask("vllm").error == "Asking vLLM (starting Python) ended with exit status 4: it said nothing."


def test_the_request_carries_everything(probe):
    """Model and config reach the probe as they are."""
    probe('say(part="config", request=request)')
    answer = ask("model", "config", model="m/x", config={"kv_connector": "é"})
    request = answer.parts["config"]["request"]
    assert request == {"parts": ["model", "config"], "model": "m/x", "config": {"kv_connector": "é"}, "skip": []}
    assert json.dumps(request)


def test_the_page_says_how_long_it_waits():
    """docs/cli.md has the default of both commands' --timeout."""
    page = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `--timeout SECONDS`")]
    assert len(rows) == 2
    assert all(f"({TIMEOUT:g})" in row for row in rows)
