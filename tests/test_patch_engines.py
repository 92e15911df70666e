"""Patches that another distribution ships, in real engines: in one process, in spawned ones, and with two workers."""

from __future__ import annotations

import json
import os
import random

import pytest

from kvplug_hooks.installed import installed
from support import engines
from support import llm as engine

pytestmark = pytest.mark.engine

EARLY = "vllm.v1.core.kv_cache_utils"
RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}

#: A patch of a function that the engine core imports before it loads plugins, and one of each model runner's start.
DECLARATIONS = f"""
from kvplug_hooks import FirstStatement, Patch


def patch(name, **fields):
    return Patch(
        id=f"acme.{{name}}",
        purpose="Notes that it was called.",
        removal_condition="Never.",
        anchor=FirstStatement(),
        import_from="acme_calls",
        import_name=f"note_{{name}}",
        known_releases=("0.32.0",),
        **fields,
    )


EARLY = patch(
    "configs",
    module="{EARLY}",
    function="get_kv_cache_configs",
    call="note_configs(vllm_config, kv_cache_specs)",
    applied="replace",
)
V1 = patch("v1", module="{RUNNERS["v1"]}", function="GPUModelRunner.__init__", call="note_v1(self)")
V2 = patch("v2", module="{RUNNERS["v2"]}", function="GPUModelRunner.__init__", call="note_v2(self)")
"""

CALLS = '''
import inspect, json, linecache, os, sys, traceback


def note(name, function, frame, **more):
    """Write down what this process knows of the function that is running."""
    import kvplug_hooks

    function = inspect.unwrap(function)
    status = kvplug_hooks.status()[f"acme.{name}"]
    (entry,) = traceback.extract_stack(frame, limit=1)
    lines, first = inspect.getsourcelines(function)
    known = {
        "patch": name,
        "process": os.getpid(),
        "state": status.state,
        "reason": status.reason,
        "file": entry.filename,
        "number": entry.lineno,
        "line": entry.line,
        "calls": sum(f"note_{name}(" in line for line in lines),
        "first": lines[0].strip(),
        "running": frame.f_code is function.__code__,
    }
    with open(os.environ["ACME_NOTES"], "a") as notes:
        notes.write(json.dumps(known | more) + "\\n")


def note_configs(vllm_config, kv_cache_specs):
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine import core

    function = kv_cache_utils.get_kv_cache_configs
    frame = sys._getframe(1)
    note("configs", function, frame, same=core.get_kv_cache_configs is function, specs=len(kv_cache_specs))


def note_runner(name, runner, frame):
    from kvplug import compat

    (base,) = [cls for cls in type(runner).__mro__ if cls.__module__ == frame.f_globals["__name__"]]
    built = "vllm_config" in vars(runner)
    note(name, base.__init__, frame, hook=compat.hook_delivery(type(runner)), built=built)


def note_v1(runner):
    note_runner("v1", runner, sys._getframe(1))


def note_v2(runner):
    note_runner("v2", runner, sys._getframe(1))
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which the distribution is installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "acme_patches.py").write_text(DECLARATIONS)
    (folder / "acme_calls.py").write_text(CALLS)
    metadata = folder / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    points = [
        f"configs@{EARLY} = acme_patches:EARLY",
        *(f"{v}@{RUNNERS[v]} = acme_patches:{v.upper()}" for v in RUNNERS),
    ]
    (metadata / "entry_points.txt").write_text("\n".join(["[kvplug.patches]", *points, ""]))
    return str(folder)


def generated(*, site, model, prompt, **engine_args):
    """Generate with an engine whose processes all have the distribution; return the tokens and this process's id."""
    import sys

    # Processes that are spawned get the path from the variable, those that are forked from this one have it.
    sys.path.insert(0, site)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    from vllm import LLM

    llm = LLM(
        model,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=64,
        max_model_len=512,
        **engine_args,
    )
    return engine.generate(llm, [prompt], 4)[0].tokens, os.getpid()


def run(site, models, tmp_path, runner="v1", env=None, **engine_args):
    """Run an engine.

    Returns:
        What its processes noted of the early function and of the model runner, and the id of the process that asked.

    """
    notes = tmp_path / "notes"
    notes.touch()
    tokens, process = engines.run(
        generated,
        runner=runner,
        timeout=600,
        env={"ACME_NOTES": str(notes), **(env or {})},
        site=site,
        model=models("llama"),
        prompt=[random.Random(7).randrange(256) for _ in range(70)],
        **engine_args,
    )
    assert len(tokens) == 4
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    configs, made = ([note for note in found if note["patch"] == name] for name in ("configs", runner))
    assert len(configs) + len(made) == len(found)
    return configs, made, process


def assert_replaced(note):
    """The function that ran is the patched one, whoever imported it, and all that shows it agrees."""
    assert (note["state"], note["reason"]) == ("applied", "The function's code was replaced in the loaded module.")
    assert note["running"]
    assert note["same"]
    assert_shown(note, EARLY, "note_configs(vllm_config, kv_cache_specs); ")
    assert note["first"] == "def get_kv_cache_configs("


def assert_hooked_before_built(note, runner):
    """The runner was patched before anybody made one, with the hook and with somebody else's patch."""
    assert (note["state"], note["reason"]) == ("applied", "It was patched in as the module was imported.")
    assert (note["hook"], note["built"], note["running"]) == ("import", False, True)
    assert_shown(note, RUNNERS[runner], f"note_{runner}(self); ")


def assert_shown(note, module, inserted):
    """A traceback has the file's line number, with the patched text beside it; `inspect` has it once."""
    path = installed().folder / f"{module.replace('.', '/')}.py"
    assert note["file"] == str(path)
    assert note["line"] == inserted + path.read_text().splitlines()[note["number"] - 1].strip()
    assert note["calls"] == 1


def test_h14_in_one_process(site, models, tmp_path, runner):
    """H14: what the engine core imported is replaced before it is called, and a runner is patched before it is made."""
    (configs,), (made,), process = run(site, models, tmp_path, runner)
    assert_replaced(configs)
    assert_hooked_before_built(made, runner)
    assert {configs["process"], made["process"]} == {process}
    assert configs["specs"] == 1


SPAWNED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


@pytest.mark.parametrize("workers", [1, 2])
def test_h14_in_spawned_processes(site, models, tmp_path, workers):
    """H14: the same where engine core and workers are spawned, with one worker and with two that share the model."""
    env = SPAWNED | ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if workers > 1 else {})
    (configs,), made, process = run(site, models, tmp_path, env=env, tensor_parallel_size=workers)
    assert_replaced(configs)
    assert configs["process"] != process
    assert configs["specs"] == workers
    assert len(made) == len({note["process"] for note in made}) == workers
    for note in made:
        assert_hooked_before_built(note, "v1")
    if workers > 1:
        assert not {process, configs["process"]} & {note["process"] for note in made}
