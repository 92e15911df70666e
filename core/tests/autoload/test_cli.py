"""The `kvplug` command: its output, its exit status, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvplug
from kvplug.cli import doctor, listing, main
from kvplug.cli.ask import Answer
from kvplug.discovery import ConnectorEntry, Discovery, SkippedEntry

REASON = "one 1.5 (one:One) and two 2.5 (two:[Two]) claim this name, so neither gets it: uninstall one."


@pytest.fixture
def cli(monkeypatch):
    """Run a command on a made-up installation: (arguments…) -> result; `answer` is what vLLM says."""
    entries = (
        ConnectorEntry("Conn", "conn", "Conn", "a-dist", "1.0", "/site"),
        ConnectorEntry("alias", "conn", "Conn", "a-dist", "1.0", "/site"),
        ConnectorEntry("Plain", "plain", "Plain", "b-dist", "2.0", "/src", editable=True, implied=True),
        ConnectorEntry("Broken", "broken", "Broken", "c-dist", "3.0", "/site"),
        ConnectorEntry("NixlConnector", "x", "X", "d-dist", "4.0", "/site"),
    )
    found = Discovery(entries, (SkippedEntry("both", "one", "1.5", REASON), SkippedEntry("both", "two", "2.5", REASON)))
    taken = {"name": "NixlConnector", "distribution": "d-dist", "version": "4.0", "reason": "vLLM already has it."}
    answer = Answer(
        parts={
            "vllm": {
                "error": None,
                "version": "0.32.0",
                "has_triton": False,
                "uses_v2_variable": None,
                "decides_by_model": True,
            },
            "autoload": {"error": None, "called": True, "skipped": [taken], "vllm_names": ["NixlConnector"]},
            "runners": {"error": None, "v1": {"delivery": "import", "error": None, "reason": ""}},
        },
        connectors={
            "conn:Conn": {"error": None, "hooks": ["before_update_states"]},
            "plain:Plain": {"error": None, "hooks": []},
            "broken:Broken": {"error": "It needs nixl.", "hooks": None},
        },
    )
    asked = []

    def ask(*parts, **kwargs):
        asked.append((parts, kwargs))
        return answer

    for module in (listing, doctor):
        monkeypatch.setattr(module, "discover", lambda: found)
        monkeypatch.setattr(module, "ask", ask)
    for name in ("VLLM_PLUGINS", "KVPLUG_DISABLE", "VLLM_USE_V2_MODEL_RUNNER", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        return CliRunner().invoke(main, list(arguments), catch_exceptions=False)

    run.answer, run.asked = answer, asked
    return run


class TestList:
    """`kvplug list`."""

    def test_json(self, cli):
        """Everything that is known, for scripts."""
        listed = json.loads(cli("list", "--json").stdout)
        rows = {row["name"]: row for row in listed["connectors"]}
        assert set(rows) == {"Conn", "alias", "Plain", "Broken"}
        assert rows["Conn"] == {
            "name": "Conn",
            "module": "conn",
            "attr": "Conn",
            "value": "conn:Conn",
            "distribution": "a-dist",
            "version": "1.0",
            "location": "/site",
            "editable": False,
            "implied": False,
            "hooks": ["before_update_states"],
            "needs_hook": True,
            "error": None,
        }
        assert (rows["alias"]["needs_hook"], rows["Plain"]["needs_hook"]) == (True, False)
        assert (rows["Broken"]["needs_hook"], rows["Broken"]["error"]) == (None, "It needs nixl.")
        assert [row["name"] for row in listed["skipped"]] == ["both", "both", "NixlConnector"]
        assert listed["skipped"][0]["reason"] == REASON
        assert listed["vllm"] == {"version": "0.32.0", "connectors": ["NixlConnector"]}
        assert listed["error"] is None

    def test_text(self, cli):
        """The same for people, with nothing cut off and nothing taken for markup."""
        text = " ".join(cli("list").stdout.split())
        for part in (
            "Conn a-dist 1.0 needed /site",
            "Plain (its class's name) b-dist 2.0 not needed /src (editable)",
            "Broken c-dist 3.0 can't be loaded /site",
            "broken:Broken It needs nixl.",
            "both one 1.5 and two 2.5 one 1.5 (one:One) and two 2.5 (two:[Two]) claim this name",
            "vLLM 0.32.0 has these by itself: NixlConnector",
        ):
            assert part in text

    def test_no_load(self, cli):
        """Without loading, what only vLLM could tell is left open."""
        listed = json.loads(cli("list", "--json", "--no-load").stdout)
        assert cli.asked == []
        assert {row["needs_hook"] for row in listed["connectors"]} == {None}
        assert listed["vllm"] is None
        assert "not asked" in cli("list", "--no-load").stdout

    def test_without_vllm(self, cli, monkeypatch):
        """Metadata is listed all the same."""
        monkeypatch.setattr(listing, "vllm_install", lambda: None)
        result = cli("list")
        assert result.exit_code == 0
        assert "vLLM isn't installed" in result.stdout
        assert "Conn" in result.stdout

    def test_nothing_installed(self, cli, monkeypatch):
        """An empty list says what to do."""
        monkeypatch.setattr(listing, "discover", Discovery)
        assert "No connector is installed" in cli("list").stdout


class TestDoctor:
    """`kvplug doctor`."""

    def test_a_problem_is_exit_status_1(self, cli):
        """The last line says what is wrong, and so does the JSON."""
        result = cli("doctor")
        assert result.exit_code == 1
        assert result.stdout.splitlines()[-1].startswith("PROBLEM (and 1 more): It needs nixl. While you don't")
        result = cli("doctor", "--json")
        assert result.exit_code == 1
        told = json.loads(result.stdout)
        assert told["ok"] is False
        assert told["summary"].startswith("PROBLEM")
        assert {finding["status"] for finding in told["findings"]} >= {"ok", "problem"}
        assert told["runner"] == "v1"
        assert told["hook"] == {"v1": "import"}
        assert told["files"] is None
        assert told["patches"] == []

    def test_all_well_is_exit_status_0(self, cli, monkeypatch):
        """The last line says what works."""
        del cli.answer.connectors["broken:Broken"]
        monkeypatch.setattr(doctor, "discover", lambda: Discovery(listing.discover().entries[:1]))
        result = cli("doctor")
        assert result.exit_code == 0, result.stdout
        assert result.stdout.splitlines()[-1].startswith("OK")

    def test_findings_have_remedies(self, cli):
        """A remedy follows what it is for."""
        text = " ".join(cli("doctor").stdout.split())
        assert "It needs nixl. → While you don't need Broken, KVPLUG_DISABLE=Broken" in text

    def test_what_is_asked(self, cli):
        """Model and config are asked about only if they are given."""
        cli("doctor")
        cli("doctor", "--model", "m", "--kv-transfer-config", '{"kv_connector": "Conn"}', "--timeout", "7")
        (parts, _), (more, options) = cli.asked
        assert parts == ("vllm", "autoload", "connectors", "runners", "files", "patches")
        assert more == (*parts, "config", "model")
        assert options == {"model": "m", "config": {"kv_connector": "Conn"}, "timeout": 7.0}

    @pytest.mark.parametrize(
        ("config", "said"), [("{'a': 1}", "Expecting property name"), ("[1]", "a list, not a JSON object")]
    )
    def test_a_config_that_is_no_json_object(self, cli, config, said):
        """It is the problem, and vLLM isn't asked about it."""
        result = cli("doctor", "--kv-transfer-config", config)
        assert result.exit_code == 1
        assert said in result.stdout.splitlines()[-1]
        assert "config" not in cli.asked[0][0]


class TestCommands:
    """The group and what can be added to it."""

    def test_version(self, cli):
        """`--version` is kvplug's."""
        assert cli("--version").stdout.strip() == f"kvplug, version {kvplug.__version__}"

    @pytest.fixture
    def extended(self, tmp_path, distribution):
        """A folder with distributions that add commands."""
        source = """
            import click
            @click.command(short_help="Greets.")
            @click.argument("who")
            def hello(who): click.echo(f"hello {who}")
            no_command = 3
        """
        entry_points = {
            "hello": "more_commands:hello",
            "three": "more_commands:no_command",
            "list": "more_commands:hello",
        }
        distribution(tmp_path, "more", entry_points, {"more_commands.py": source}, group="kvplug.commands")
        modules = {"bad_commands.py": "import sys; sys.exit(9)"}
        distribution(tmp_path, "bad", {"bad": "bad_commands:x", "worse": "nonsense"}, modules, group="kvplug.commands")
        return tmp_path

    def test_commands_of_other_distributions(self, extended, run_python):
        """They work, a broken one says why when it is used and in the help, and none replaces one of kvplug's own."""

        def run(*arguments):
            return run_python(["-m", "kvplug.cli", *arguments], path=[extended])

        assert run("hello", "world").stdout == "hello world\n"
        bad = run("bad", "--any", "thing")
        assert bad.returncode == 1
        assert "'bad' of bad 1.0 can't be loaded from bad_commands:x (SystemExit: 9)" in bad.stderr
        assert "not a click command" in run("three").stderr
        text = run("--help")
        assert text.returncode == 0
        for part in ("Greets.", "(broken: SystemExit: 9)", "List installed", "worse of bad 1.0"):
            assert part in text.stdout

    def test_an_unknown_command_is_exit_status_2(self, cli):
        """As is usual."""
        assert cli("nothing").exit_code == 2

    def test_every_option_is_documented(self):
        """The reference page names each command and option."""
        page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
        for name, command in main.commands.items():
            assert f"## `kvplug {name}`" in page
            for option in [name for parameter in command.params for name in parameter.opts]:
                assert f"| `{option}" in page

    def test_no_command_imports_torch(self, run_script):
        """The command's own process stays free of what it looks at."""
        heavy = run_script(
            """
            import sys, kvplug.cli.ask as ask, kvplug.cli.doctor, kvplug.cli.listing
            from kvplug.cli import main
            from click.testing import CliRunner
            for module in (kvplug.cli.doctor, kvplug.cli.listing):
                module.ask = lambda *parts, **options: ask.Answer()
            for arguments in (["--help"], ["list"], ["doctor"], ["doctor", "--model", "m", "--json"]):
                CliRunner().invoke(main, arguments)
            answer(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "numpy", "transformers"}))
            """
        )
        assert heavy == []
