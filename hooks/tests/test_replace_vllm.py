"""Delivery into modules that vLLM has loaded, in real processes of the installed vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kvplug
import kvplug_hooks

DECLARE = """
from kvplug_hooks import FirstStatement, Patch

def patch(function, argument):
    return Patch(
        id=f"made_up.{function}",
        purpose="Test.",
        removal_condition="Never.",
        module="vllm.v1.core.kv_cache_utils",
        function=function,
        anchor=FirstStatement(),
        import_from="made_up",
        import_name="seen_by_" + function,
        call=f"{argument} = seen_by_{function}({argument})",
        known_releases=("0.32.0",),
        applied="replace",
    )

PATCHES = [
    patch("unify_kv_cache_spec_page_size", "kv_cache_spec"),
    patch("get_kv_cache_configs", "kv_cache_specs"),
]

seen = []

def seen_by_unify_kv_cache_spec_page_size(value):
    seen.append(value)
    return value

def seen_by_get_kv_cache_configs(value):
    seen.append(value)
    raise LookupError("made up")
"""

SCRIPT = """
import inspect, json, linecache, multiprocessing, sys, traceback

def look():
    # As vLLM's engine core does: its module's imports first, then the plugins.
    from vllm.v1.engine import core
    early = "vllm.v1.core.kv_cache_utils" in sys.modules, "kvplug_hooks" in sys.modules
    kept = core.get_kv_cache_configs
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    import kvplug_hooks, made_up
    from vllm.v1.core import kv_cache_utils as utils
    frames = []
    for function, argument in ((utils.unify_kv_cache_spec_page_size, {"layer": 3}), (kept, "specs")):
        arguments = [argument] if function is not kept else [None, argument, []]
        try:
            function(*arguments)
        except (AttributeError, LookupError) as error:
            entries = traceback.extract_tb(error.__traceback__)
            frames.append([type(error).__name__, *[[e.filename, e.lineno, e.line] for e in entries[1:2]]])
    linecache.checkcache()
    source, first = inspect.getsourcelines(kept)
    return {
        "early": early,
        "same": kept is utils.get_kv_cache_configs,
        "seen": made_up.seen,
        "frames": frames,
        "first": first,
        "calls": sum("seen_by_" in line for line in source),
        "marks": utils.__kvplug_patches__,
        "states": {name: entry.state for name, entry in kvplug_hooks.status().items()},
    }

def work(queue):
    queue.put(look())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print("RESULT " + json.dumps(queue.get()))
    process.join()
"""


@pytest.mark.engine
def test_a_function_that_the_engine_core_imported_is_replaced(tmp_path, vllm_tree):
    """In vLLM's own order of imports, in a spawned process: references, tracebacks, source, status."""
    (tmp_path / "made_up.py").write_text(DECLARE)
    metadata = tmp_path / "made_up-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvplug.patches]\npatches = made_up:PATCHES\n")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    code = [str(Path(package.__path__[0]).parent) for package in (kvplug, kvplug_hooks)]
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
        | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *code])},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (result,) = [json.loads(line[7:]) for line in done.stdout.split("\n") if line.startswith("RESULT ")]
    path = vllm_tree.folder / "vllm/v1/core/kv_cache_utils.py"
    lines = path.read_text().split("\n")
    assert result["early"] == [True, False]
    assert result["same"] is True
    assert result["seen"] == [{"layer": 3}, "specs"]
    assert result["marks"] == ["made_up.unify_kv_cache_spec_page_size", "made_up.get_kv_cache_configs"]
    assert {name: state for name, state in result["states"].items() if "made_up" in name} == dict.fromkeys(
        result["marks"], "applied"
    )
    assert result["states"]["hybrid_page_size"] == "not needed"
    assert lines[result["first"] - 1] == "def get_kv_cache_configs("
    assert result["calls"] == 1
    (unify, (file, number, line)), (configs, (file_too, number_too, line_too)) = result["frames"]
    assert (unify, configs) == ("AttributeError", "LookupError")
    assert {file, file_too} == {str(path)}
    original = lines[number - 1].strip()
    assert original.startswith("page_sizes = {")
    # Where the error came from is on the line of the file; the text beside it is the patched one.
    assert line == f"kv_cache_spec = seen_by_unify_kv_cache_spec_page_size(kv_cache_spec); {original}"
    assert line_too.endswith("; " + lines[number_too - 1].strip())
