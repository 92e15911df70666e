"""`kvplug pd up`: what it would start, what it refuses, and what its page says. Nothing is started here."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvplug_pd_reuse.cli import pd
from kvplug_pd_reuse.cli import up as module

PAGE = Path(__file__).parents[3] / "docs" / "pd-up.md"


@pytest.fixture
def run(monkeypatch):
    """Run the command, with nothing started: (arguments…) -> (result, what would have been served or None)."""
    for name in ("VLLM_API_KEY", "CUDA_VISIBLE_DEVICES", "NO_PROXY", "no_proxy", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    served = []
    monkeypatch.setattr(module, "serve", lambda engines, router, **options: served.append((*engines, router, options)))

    def call(*arguments):
        served.clear()
        # 8000 may be somebody's; a --port among the arguments wins.
        result = CliRunner().invoke(pd, ["up", "--port", str(free_port()), *arguments], catch_exceptions=False)
        return result, served[0] if served else None

    return call


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def options_of(program):
    """Return a command's options with their values, the last of each."""
    command = list(program.command)
    return {
        name: None if value.startswith("--") else value
        for name, value in zip(command, [*command[1:], "--"], strict=True)
        if name.startswith("--")
    }


def test_the_three_programs(run):
    """Both engines have the connector and ports of their own; the router has both engines and speaks Nixl's way."""
    result, (prefill, decode, router, options) = run("--model", "org/m")
    assert result.exit_code == 0
    for engine in (prefill, decode):
        assert engine.command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        given = options_of(engine)
        assert given["--model"] == "org/m"
        assert given["--host"] == "127.0.0.1"
        # Where KV is stored is the connector's to decide.
        assert json.loads(given["--kv-transfer-config"]) == {"kv_connector": "PDReuseConnector", "kv_role": "kv_both"}
        assert "CUDA_VISIBLE_DEVICES" not in engine.environ
        assert (engine.url, engine.ready) == (f"http://127.0.0.1:{given['--port']}", "/health")
    assert prefill.url != decode.url
    given = options_of(router)
    assert Path(router.command[0]).name == "vllm-router"
    assert (
        given.items()
        >= {
            "--vllm-pd-disaggregation": None,
            "--prefill": prefill.url,
            "--decode": decode.url,
            "--kv-connector": "nixl",
            "--policy": "round_robin",
            "--host": "127.0.0.1",
        }.items()
    )
    ports = {given["--prometheus-port"], given["--port"], prefill.url.rpartition(":")[2], decode.url.rpartition(":")[2]}
    assert len(ports) == 4
    assert options["folder"] is None


def test_options_of_the_engines(run):
    """What follows `--` goes to both, the rest to one of them, and the settings to the connector."""
    arguments = ["--prefill-devices", "0,1", "--decode-devices", "2", "--prefill-args", "-tp 2 --name 'a b'"]
    arguments += ["--decode-args=--seed 1", "--config", '{"l1_size_per_rank": "8GiB"}', "--model", "m"]
    _, (prefill, decode, *_) = run(*arguments, "--", "--seed", "0", "--enforce-eager")
    assert list(prefill.command[3:10]) == ["--seed", "0", "--enforce-eager", "-tp", "2", "--name", "a b"]
    assert list(decode.command[3:8]) == ["--seed", "0", "--enforce-eager", "--seed", "1"]
    assert [engine.environ["CUDA_VISIBLE_DEVICES"] for engine in (prefill, decode)] == ["0,1", "2"]
    for engine in (prefill, decode):
        config = json.loads(options_of(engine)["--kv-transfer-config"])
        assert config["kv_connector_extra_config"] == {"l1_size_per_rank": "8GiB"}


def test_ports_and_hosts(run):
    """They are as asked for; what is asked from here is an address that can be."""
    front, first, second = (str(free_port()) for _ in range(3))
    ports = ["--port", front, "--prefill-port", first, "--decode-port", second]
    _, (prefill, decode, router, _) = run("--model", "m", "--host", "0.0.0.0", *ports)
    assert [options_of(program)["--port"] for program in (prefill, decode, router)] == [first, second, front]
    assert options_of(router)["--host"] == "0.0.0.0"
    assert router.url == f"http://127.0.0.1:{front}"


def test_a_proxy_isnt_asked_for_the_engines(run, monkeypatch):
    """The router asks them itself, whatever the environment says of proxies."""
    monkeypatch.setenv("NO_PROXY", "example.org")
    _, (*_, router, _) = run("--model", "m")
    assert router.environ["NO_PROXY"] == router.environ["no_proxy"] == "example.org,127.0.0.1"


@pytest.mark.parametrize("option", ["--port", "--prefill-port", "--decode-port"])
def test_a_port_in_use(run, option):
    """It is named, with the option that chooses another one."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result, served = run("--model", "m", option, str(port))
    assert (result.exit_code, served) == (1, None)
    assert f"Port {port} of 127.0.0.1 can't be used (Address already in use): choose another one with {option}." in (
        result.stderr
    )


def test_one_port_for_two(run):
    """The same, where the command's own options are at odds."""
    port = str(free_port())
    result, served = run("--model", "m", "--prefill-port", port, "--decode-port", port)
    assert (result.exit_code, served) == (1, None)
    assert "choose another one with --decode-port" in result.stderr


@pytest.mark.parametrize("config", ["{a: 1}", "[1]", '"text"'])
def test_config_that_is_no_json_object(run, config):
    """It is a mistake in the command line."""
    result, served = run("--model", "m", "--config", config)
    assert (result.exit_code, served) == (2, None)
    assert "'--config'" in result.stderr
    assert "in single quotes." in result.stderr


def test_an_unknown_setting_is_the_connectors_to_refuse(run):
    """The command doesn't know which settings there are."""
    _, (prefill, *_) = run("--model", "m", "--config", '{"no_such": [1]}')
    assert '"no_such": [1]' in options_of(prefill)["--kv-transfer-config"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "--port", "1"], "--port can't be given to the engines: use --prefill-port and --decode-port."),
        (["--prefill-args", "--host=0.0.0.0"], "--host can't be given to the engines"),
        (["--decode-args", "--model x"], "--model can't be given to the engines"),
        (["--", "--kv_transfer_config.kv_role=kv_both"], "give settings of the connector with --config"),
        (["--", "--api-key", "x"], "have keys checked in front of it"),
        (["m"], "Unexpected argument 'm': name the model with --model"),
        (["--max-model-len", "9"], "Options of vLLM come after `--`."),
        (["--decode-args", "'x"], "No closing quotation: quote it as a shell wants it."),
    ],
)
def test_what_engines_cant_be_given(run, arguments, said):
    """What the command sets itself, what the router can't do, and what is in the wrong place."""
    result, served = run("--model", "m", *arguments)
    assert (result.exit_code, served) == (2, None)
    assert said in result.stderr


def test_without_vllm(run, monkeypatch):
    """One sentence, with what to do."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result, served = run("--model", "m")
    assert (result.exit_code, served) == (1, None)
    assert result.stderr.startswith(f"Error: vLLM isn't installed in this environment ({sys.executable}): install it")


def test_without_a_router(run, monkeypatch):
    """The same."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    result, served = run("--model", "m")
    assert (result.exit_code, served) == (1, None)
    assert result.stderr == 'Error: The router isn\'t installed: pip install "kvplug-pd-reuse[router]".\n'


def test_a_key_that_no_request_could_have(run, monkeypatch):
    """With it, engines would refuse whatever the router sends."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    result, served = run("--model", "m")
    assert (result.exit_code, served) == (1, None)
    assert result.stderr.startswith("Error: VLLM_API_KEY is set: unset it, because the router")
    assert "secret" not in result.stderr


def test_it_is_a_command_of_kvplug_and_imports_little():
    """`kvplug pd up` is there, and its process stays free of torch and vLLM up to where it starts anything."""
    code = """
        import sys, json
        from click.testing import CliRunner
        from kvplug.cli import main
        for arguments in (["--help"], ["pd", "up", "--help"]):
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 0, result.output
        assert "Start an engine that prefills" in result.output
        started = []
        sys.modules["kvplug_pd_reuse.cli.up"].serve = lambda *programs, **options: started.append(programs)
        assert CliRunner().invoke(main, ["pd", "up", "--model", "m", "--port", sys.argv[1]]).exit_code == 0
        assert started
        print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "numpy", "transformers"}))
    """
    code = "\n".join(line[8:] for line in code.splitlines())
    command = [sys.executable, "-c", code, str(free_port())]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_option_is_documented():
    """The page has a row for each option, with its default, and for no other."""
    rows = {
        line.split("|")[1].split()[0].strip("`"): line for line in PAGE.read_text().splitlines() if line[:4] == "| `-"
    }
    options = [parameter for parameter in module.up.params if parameter.param_type_name == "option"]
    assert sorted(rows) == sorted([*(option.opts[0] for option in options), "--"])
    for option in options:
        if isinstance(option.default, (int, float)) and not option.is_flag:
            assert f"({option.default})" in rows[option.opts[0]]
