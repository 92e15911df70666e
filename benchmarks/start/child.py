"""Starts of a worker, each in a forked process: from the moment at which vLLM loads its plugins to the loaded runner.

`python -m benchmarks.start.child RUNS` prints a line of JSON with the seconds of each. All that the model runners
import is imported before the first fork, so that what differs between two starts isn't lost in what doesn't.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}
#: What the engine core has imported when it loads plugins, and patches of the kind `replace` are for.
_EARLY = "vllm.v1.engine.core"


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process that has all that this one has."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, json.dumps(function(*arguments)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{function.__name__}{arguments} failed")
    return json.loads(text)


def imports_of(module: str) -> list[str]:
    """Return what a module imports beyond what is loaded, itself left out."""
    before = set(sys.modules)
    importlib.import_module(module)
    return [name for name in sys.modules if name not in before and name not in RUNNERS.values()]


def start(module: str, plugins: str) -> list[float]:
    """Load plugins and a model runner, and return the seconds on the wall and of the CPU.

    Args:
        module: The model runner's.
        plugins: The names of vLLM's plugins that are loaded, for `VLLM_PLUGINS`.

    """
    os.environ["VLLM_PLUGINS"] = plugins
    wall, cpu = time.perf_counter(), time.process_time()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    loaded = importlib.import_module(module)
    seconds = [time.perf_counter() - wall, time.process_time() - cpu]
    if hasattr(loaded, "before_update_states") is not (plugins == "kvplug"):
        raise RuntimeError(f"{module} has the hook with one of {plugins!r} and nothing")
    return seconds


def replace() -> list[float]:
    """Replace the function of the page-size patch in its loaded module, and return the seconds.

    This vLLM doesn't need it, so a check that says so is left out.
    """
    import dataclasses

    from kvplug_hooks.patches.hybrid_page_size import HYBRID_PAGE_SIZE
    from kvplug_hooks.replace import replace_functions

    name = next(name for name in HYBRID_PAGE_SIZE.modules if name in sys.modules)
    states: list[str] = []
    patch = dataclasses.replace(HYBRID_PAGE_SIZE, not_needed=None)
    wall, cpu = time.perf_counter(), time.process_time()
    replace_functions(sys.modules[name], [patch], lambda _patch, _module, state, reason: states.append(state + reason))
    seconds = [time.perf_counter() - wall, time.process_time() - cpu]
    if not states[0].startswith("applied"):
        raise RuntimeError(states[0])
    return seconds


def measure(runs: int) -> dict[str, list[list[float]]]:
    """Return the seconds of each start, by model runner and whether kvplug is there, and of each replacement."""
    importlib.import_module(_EARLY)
    for module in RUNNERS.values():
        for name in forked(imports_of, module):
            importlib.import_module(name)
    if loaded := [name for name in sys.modules if name in RUNNERS.values() or name.startswith("kvplug")]:
        raise RuntimeError(f"these are loaded already: {', '.join(loaded)}")
    found: dict[str, list[list[float]]] = {}
    for _ in range(runs):  # in turns: whatever else the machine does hits both
        for runner, module in RUNNERS.items():
            found.setdefault(f"{runner} plain", []).append(forked(start, module, ""))
            found.setdefault(f"{runner} hooked", []).append(forked(start, module, "kvplug"))
        found.setdefault("replaced", []).append(forked(replace))
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
