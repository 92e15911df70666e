"""How kvplug's hook got into the model runner that a server uses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from demolib.processes import spawn

__all__ = ["HookProbe", "hooked_runner"]

# What kvplug logs in a worker when it registers a connector's hooks, at the first step.
_LIVE = re.compile(r"kvplug: hooks of .*Type1Connector.* are live in <class '(?P<module>[\w.]+)\.(?P<name>\w+)'>")

# Does what a worker does to import a runner, and looks at the code that is there then.
_PROBE = """
import importlib, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from kvplug.compat import hook_delivery
print("delivery:", hook_delivery(getattr(importlib.import_module(sys.argv[1]), sys.argv[2])))
"""

_TIMEOUT = 120.0


def hooked_runner(log: str) -> tuple[str, str] | None:
    """Return module and name of the runner class in which a server's worker has type1's hooks live, or None.

    Args:
        log: What the server has printed.

    """
    found = _LIVE.search(log)
    return None if found is None else (found["module"], found["name"])


class HookProbe:
    """Finds out how the hook is delivered to a runner class, in a process of its own that takes some seconds."""

    def __init__(self, runner: tuple[str, str], build: Path) -> None:
        """Start looking.

        Args:
            runner: Module and name of the class.
            build: The servers' folder for vLLM's own files.

        """
        #: Dotted name of the class.
        self.runner = ".".join(runner)
        #: The process that looks.
        self.process = spawn(["-c", _PROBE, *runner], build, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def result(self) -> str | None:
        """Return `import`, `file`, or None if the class has no hook or couldn't be looked at."""
        try:
            output, _ = self.process.communicate(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            return None
        found = re.search(r"^delivery: (import|file)$", output.decode(errors="replace"), re.MULTILINE)
        return None if found is None else found[1]
