"""Many at once: appliers, and processes that import what is being patched."""

from __future__ import annotations

import json
import subprocess

import pytest

pytestmark = pytest.mark.install

APPLY = """
import sys
from kvplug_hooks.cli import main
print("ready", flush=True)
sys.stdin.readline()
main()
"""

# Imports the module anew until it is told to stop: the original or the patched one, and nothing else.
IMPORT = """
import importlib, select, sys
names = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
seen = []
print("ready", flush=True)
while True:
    last = bool(select.select([sys.stdin], [], [], 0)[0])
    for name in names:
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        calls = "before_update_states" in module.GPUModelRunner.execute_model.__code__.co_names
        assert calls == hasattr(module, "before_update_states"), name
        seen.append((name, calls))
    if last:
        break
print({name: [calls for other, calls in seen if other == name][-1] for name in names} == dict.fromkeys(names, True))
# Once it is there it stays.
print(all(sorted(order) == order for name in names for order in [[calls for other, calls in seen if other == name]]))
"""


def start(command):
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_eight_appliers_at_once_while_others_import(env, own_code):
    """All succeed, one of them applies, nothing is applied twice, and whoever imports gets a whole module."""
    importers = [start([env.python, "-I", "-c", IMPORT]) for _ in range(2)]
    appliers = [start(own_code(APPLY, "apply", "--json", "--python", env.python)) for _ in range(8)]
    for process in appliers:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120) for process in appliers]
    imported = [process.communicate("\n", timeout=120) for process in importers]

    assert [process.returncode for process in appliers] == [0] * 8, said
    changed = [json.loads(output)["changed"] for output, _ in said]
    assert sorted(map(len, changed)) == [0] * 7 + [2]
    assert [process.returncode for process in importers] == [0, 0], imported
    assert [output for output, _ in imported] == ["True\nTrue\n"] * 2
    for path in (env.v1, env.v2):
        assert path.read_text().count("import before_update_states") == 1
        assert path.read_text().count("= before_update_states(self, scheduler_output)") == 1
    assert env.cli("verify").exit_code == 0
    assert list(env.site.rglob("*.kvplug-hooks-new")) == []


def test_appliers_and_reverters_at_once(env, own_code):
    """Whoever comes last decides; every file is then wholly one or the other, and RECORD goes with it."""
    before = env.snapshot()
    commands = ["apply", "revert"] * 3
    processes = [start(own_code(APPLY, command, "--json", "--python", env.python)) for command in commands]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 6, said
    assert env.hooked() in ([], ["v1", "v2"])
    assert env.cli("verify").exit_code == (0 if env.hooked() else 3)
    assert env.cli("revert").exit_code == 0
    assert env.snapshot() == before
