"""The demo: what it measures and concludes, and that it leaves nothing behind."""

# ruff: noqa: E402 - the demo's modules can be imported once its folder is on the path

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

_SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.append(str(_SCRIPTS))

import demo
from demolib import report, text
from demolib.client import Pass, Reply, Request, converse
from demolib.hook import hook_delivery
from demolib.model import make_model
from demolib.options import read_options
from demolib.plot import plot
from demolib.processes import end, exit_status, spawn
from demolib.server import Server, ServerError, free_port
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEYS = {
    "requests",
    "prompt_tokens",
    "tokens_loaded",
    "ttft_cold_s",
    "ttft_warm_s",
    "hook_mode",
    "tokens_equal",
    "logprobs_equal",
}
_DEMO_TIMEOUT = 900


# -- The workload ----------------------------------------------------------------------------------------------------


def test_conversations_share_their_system_prompt_only():
    """Each conversation has the same long system prompt, and questions that no other one has."""
    made = text.conversations(text.MAX_CONVERSATIONS, text.MAX_TURNS)
    assert len(made) == text.MAX_CONVERSATIONS
    assert len({one.system for one in made}) == 1
    assert all(len(one.questions) == text.MAX_TURNS for one in made)
    questions = [question for one in made for question in one.questions]
    assert len(set(questions)) == len(questions)
    assert len(made[0].system) > 4 * min(map(len, questions))


def test_a_text_that_is_too_short_is_an_error():
    """There are no passages beyond a text's end."""
    with pytest.raises(ValueError, match="no 2 passages"):
        text._passages("word " * 10, 40, 2)


def test_each_turn_contains_what_was_said_before():
    """Turns of different conversations alternate, and each one's history has its questions and the answers to them."""
    two = [text.Conversation("s", ("a1", "a2")), text.Conversation("s", ("b1", "b2"))]
    replies = list(converse(lambda request: _reply(request=request, text=f"re {request.messages[-1]['content']}"), two))
    assert [[message["content"] for message in reply.request.messages] for reply in replies] == [
        ["s", "a1"],
        ["s", "b1"],
        ["s", "a1", "re a1", "a2"],
        ["s", "b1", "re b1", "b2"],
    ]
    assert [(reply.request.conversation, reply.request.turn) for reply in replies] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_the_tokenizer_is_real_and_the_model_is_made_once(tmp_path: Path):
    """The tokenizer has whole words as tokens and gives the text back; a second call makes nothing."""
    from tokenizers import Tokenizer

    model = make_model(tmp_path, seed=1)
    made = {file: file.stat().st_mtime_ns for file in model.iterdir()}
    assert make_model(tmp_path, seed=1) == model
    assert {file: file.stat().st_mtime_ns for file in model.iterdir()} == made
    assert list(tmp_path.iterdir()) == [model]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    system = text.conversations(1, 1)[0].system
    encoded = tokenizer.encode(system)
    assert tokenizer.decode(encoded.ids) == system
    assert len(encoded.ids) < len(system) / 3
    assert tokenizer.encode("<|user|>hello<|end|>").tokens[0] == "<|user|>"


# -- The conclusions -------------------------------------------------------------------------------------------------


def _reply(
    *,
    request: Request | None = None,
    ttft_s: float = 1.0,
    token_ids: tuple[int, ...] = (1, 2),
    logprobs: tuple[float, ...] = (-1.0, -2.0),
    text: str = "",
) -> Reply:
    return Reply(request or Request(0, 0, ()), ttft_s, 100, token_ids, logprobs, text)


def _passes(warm: list[Reply] | None = None, **counts: int) -> report.Passes:
    """Return passes of two requests that show what they should, but for what is given."""
    first, second = Request(0, 0, ()), Request(0, 1, ())

    def replies(*ttfts: float) -> list[Reply]:
        pairs = zip((first, second), ttfts, ((1, 2), (3, 4)), strict=True)
        return [_reply(request=request, ttft_s=ttft, token_ids=tokens) for request, ttft, tokens in pairs]

    return report.Passes(
        Pass(replies(3.0, 5.0)),
        Pass(replies(4.0, 6.0), tokens_loaded=counts.get("cold", 0), local_hits=counts.get("hits", 0)),
        Pass(replies(2.0, 2.0), tokens_loaded=150, local_hits=50),
        Pass(warm or replies(0.1, 0.3), tokens_loaded=counts.get("loaded", 190)),
    )


def test_the_result_is_that_of_the_warm_pass():
    """The result has the keys that scripts read; counts are those of the warm pass, times are medians."""
    found = report.result(_passes(), "import", {"seed": 7})
    assert found.keys() >= _KEYS
    assert (found["requests"], found["prompt_tokens"], found["tokens_loaded"]) == (2, 200, 190)
    assert (found["ttft_cold_s"], found["ttft_warm_s"]) == (5.0, 0.2)
    assert found["ttft_ratio"] == pytest.approx(25)
    assert found["ttft_worst_s"] == {"alone": 5.0, "cold": 6.0, "warm": 0.3}
    assert (found["tokens_equal"], found["logprobs_equal"]) == (True, True)
    assert found["seed"] == 7
    assert not report.faults(found)
    assert not report.warnings(found)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("passes", "hook_mode", "said"),
    [
        (_passes([_reply(token_ids=(1, 9)), _reply(token_ids=(3, 4))]), "import", "tokens differ"),
        (
            _passes([_reply(), _reply(token_ids=(3, 4), logprobs=(-1.0, -2.00002))]),
            "import",
            "Log-probabilities differ",
        ),
        (_passes(loaded=99), "import", "Only 99 of 200 prompt tokens"),
        (_passes(cold=1), "import", "loaded in the cold pass"),
        (_passes(hits=32), "import", "vLLM's own prefix cache"),
        (_passes(), None, "hook isn't live"),
        (_passes(), "file", "was to be delivered by import, and was by file"),
    ],
)
def test_what_is_wrong_is_a_fault(passes: report.Passes, hook_mode: str | None, said: str):
    """Each thing that the demo is to show is a fault of its own if it isn't so."""
    faults = report.faults(report.result(passes, hook_mode, {}))
    assert len(faults) == 1
    assert said in faults[0]


def test_log_probabilities_within_the_tolerance_are_equal():
    """A difference that a prompt's cut into chunks can make is none, and it is reported."""
    found = report.result(
        _passes([_reply(logprobs=(-1.0, -2.000002)), _reply(token_ids=(3, 4))]), "file", {}, wanted="file"
    )
    assert found["logprobs_equal"] is True
    assert found["logprobs_max_difference"]["warm"] == pytest.approx(2e-6)
    assert not report.faults(found)


def test_answers_that_are_all_the_same_show_nothing():
    """A model that says the same whatever the prompt can't show that KV was right."""
    same = Pass([_reply(), _reply()], tokens_loaded=200)
    faults = report.faults(report.result(report.Passes(same, Pass(same.replies), same, same), "import", {}))
    assert faults == ["All answers are the same, so that they are equal shows nothing."]


def test_a_small_ratio_is_a_warning_only():
    """Times depend on what else the machine does, so they don't decide whether the demo fails."""
    found = report.result(_passes([_reply(ttft_s=2.0), _reply(ttft_s=2.0, token_ids=(3, 4))]), "import", {})
    assert "2.5 times" in report.warnings(found)[0]
    assert not report.faults(found)


def test_the_hook_is_that_of_the_running_worker():
    """How the hook was delivered is what the worker logged; without that line it isn't live."""
    line = (
        "(Worker pid=7) INFO [dispatch.py:96] kvplug: hooks of Type1Connector (kvplug-type1 0.1.0) are live in "
        "<class 'vllm.v1.worker.cpu_model_runner.CPUModelRunner'>, delivered by import\n"
    )
    assert hook_delivery("one\n" + line) == "import"
    assert hook_delivery(line.replace("by import", "by file")) == "file"
    assert hook_delivery(line.replace("by import", "by None")) is None
    assert hook_delivery(line.replace("Type1", "Other")) is None
    assert hook_delivery("") is None


def test_type2_needs_no_hook(capsys: pytest.CaptureFixture[str]):
    """It isn't looked for, nothing is said of it, and how it is delivered can't be chosen."""
    found = report.result(_passes(), None, {}, connector="type2", wanted=None)
    assert not report.faults(found)
    console = Console(width=100, force_terminal=False)
    with console.capture() as shown:
        console.print(report.table(found))
    assert "type2, warm" in shown.get()
    assert "hook" not in shown.get()
    with pytest.raises(SystemExit):
        read_options(["--connector", "type2", "--hook", "file"], Path("out"))
    assert "type2 needs no hook" in capsys.readouterr().err


def test_the_plot_is_a_png(tmp_path: Path):
    """The figure is drawn from the result alone."""
    about = {"conversations": 1, "turns": 2, "model_parameters": 10**7, "versions": {"vllm": "0.32.0"}}
    plot(report.result(_passes(), "import", about), tmp_path / "ttft.png")
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG\r\n")


# -- Servers and processes -------------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The demo ends with one sentence that says what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"Port {port} can't be used .* choose another with --port"):
            free_port(port)
        assert demo.main(["--port", str(port), "--out", str(tmp_path)]) == 1
    assert f"Port {port} can't be used" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    end(processes)


def test_a_server_that_ends_shows_its_log(tmp_path: Path, spawned: list[subprocess.Popen[bytes]]):
    """A server that doesn't start is one sentence, and the end of what it printed."""
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = spawn(["-c", "print('no such thing'); raise SystemExit(3)"], tmp_path, output, subprocess.STDOUT)
    spawned.append(process)
    server = Server(process, free_port(), log)
    process.wait()
    with pytest.raises(ServerError, match="ended with status 3 as it started") as caught:
        server.is_ready()
    assert caught.value.log == "no such thing"


def test_ending_a_process_ends_what_it_started(tmp_path: Path, spawned: list[subprocess.Popen[bytes]]):
    """Children that outlive their parent, or ignore SIGTERM, are ended with its group."""
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    process = spawn(["-c", parent], tmp_path, subprocess.PIPE, subprocess.DEVNULL)
    spawned.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"deaf\n"
    while exit_status(process) is None:
        time.sleep(0.01)
    group = process.pid
    assert _alive({group})
    end([process])
    assert _gone({group})
    process.stdout.close()


# -- All of it, on a real engine -------------------------------------------------------------------------------------


def _start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(_SCRIPTS / "demo.py"), "--out", str(out), "--conversations", "2", "--turns", "2"]
    return subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return state, parent and group of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[2])


def _stats() -> dict[int, tuple[str, int, int]]:
    found = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {pid: stat for pid, stat in found.items() if stat is not None}


def _groups(pid: int) -> set[int]:
    """Return the process groups of a process's descendants, its own left out."""
    stats = _stats()
    family = {pid}
    while more := {child for child, (_, parent, _) in stats.items() if parent in family} - family:
        family |= more
    return {stats[member][2] for member in family if member in stats} - {pid}


def _alive(groups: set[int]) -> list[int]:
    """Return the processes in groups, those that have ended and weren't waited for left out."""
    return [pid for pid, (state, _, group) in _stats().items() if group in groups and state not in "ZX"]


def _gone(groups: set[int]) -> bool:
    """Wait until no process is left in groups: one that got SIGKILL takes a moment to end."""
    deadline = time.monotonic() + 10
    while _alive(groups) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _alive(groups)


@pytest.mark.engine
def test_the_demo_shows_reuse_on_a_real_server(tmp_path: Path):
    """From start to end: result, plot and table, of a server that loaded most prompt tokens and answered the same."""
    process = _start(tmp_path)
    try:
        output, _ = process.communicate(timeout=_DEMO_TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, output
    found: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert found.keys() >= _KEYS
    assert found["requests"] == 4
    assert found["tokens_equal"] is True
    assert found["logprobs_equal"] is True
    assert found["hook_mode"] == "import"
    assert found["prompt_tokens"] == sum(row["prompt_tokens"] for row in found["per_request"])
    # All but the last, incomplete block of each prompt.
    assert found["prompt_tokens"] - 32 * 4 <= found["tokens_loaded"] < found["prompt_tokens"]
    assert found["tokens_loaded_cold"] == 0
    assert found["vllm_prefix_hits"] == 0
    assert found["distinct_answers"] == 4
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "import: patched in memory" in output
    assert '"kv_connector":"Type1Connector","kv_role":"kv_both"' not in (tmp_path / "server-alone.log").read_text()
    assert "hooks of Type1Connector" in (tmp_path / "server-type1.log").read_text()


def test_a_restart_that_is_not_warm_is_a_fault():
    """With an L2 tier, the server that was started again must have loaded most prompt tokens, and answered the same."""
    passes = _passes()
    warm = report.result(replace(passes, restarted=passes.warm), "import", {})
    assert warm["tokens_loaded_restarted"] == passes.warm.tokens_loaded
    assert report.faults(warm) == report.faults(report.result(passes, "import", {}))
    cold = report.result(replace(passes, restarted=replace(passes.warm, tokens_loaded=0)), "import", {})
    assert any("after the restart" in sentence for sentence in report.faults(cold))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Undo what a shell does to its background jobs: they, and what they start, ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.engine
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("until", ["", "L1 holds"], ids=["early", "with all processes"])
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path, until: str):
    """SIGINT as the servers' first processes start, and when workers are there, too, ends all, with status 130."""
    process = _start(tmp_path)
    log = tmp_path / "server-type1.log"
    deadline = time.monotonic() + _DEMO_TIMEOUT
    try:
        while not (log.exists() and until in log.read_text()) or len(_groups(process.pid)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        groups = _groups(process.pid)
        assert _alive(groups)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "Interrupted" in output
    assert _gone(groups), _alive(groups)
    assert not (tmp_path / "result.json").exists()
