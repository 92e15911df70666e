"""The memory tier beside AIBrix's cache manager, on the same blocks, in one process and in turns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.common.figures import Figure
from benchmarks.common.processes import ROOT

__all__ = ["measure"]

_FOLDER = ROOT / "build" / "bench-aibrix"

#: `first_lookup` makes the keys too, as for a request that is new; later lookups have them. AIBrix starts from token
#: ids each time.
_LIMITS = {"put": 1, "get": 1, "lookup": 20, "first_lookup": None}

#: AIBrix, and what its cache manager imports. Its own requirements bring CUDA libraries, which L1 has no use for.
_PACKAGES = (
    "aibrix-kvcache==0.8.0",
    "cityhash",
    "more-itertools",
    "msgspec",
    "netifaces",
    "nvtx",
    "redis==6.0.0",
    "rocksdict",
    "sortedcontainers",
    "uvloop",
    "validators",
    "zstandard",
)


def measure(*, quick: bool = False) -> list[Figure]:
    """Measure put, get and lookup of both, on 128 MiB of blocks of 32 tokens: how many times faster the memory tier is.

    AIBrix gets an environment of its own, which is made when it is first needed. torch and numpy are those of this one.

    Raises:
        RuntimeError: The environment can't be made, or the measurement failed.

    """
    python = _environment()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(str(path) for path in _sources())]),
        "AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED": "1",
        "AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB": "0.75",
        "AIBRIX_KV_CACHE_OL_L1_CACHE_EVICTION_POLICY": "LRU",
        "AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND": "",
    }
    output = _run([str(python), "-m", "benchmarks.store.aibrix_side", str(2 if quick else 15)], environment)
    results = json.loads(output.splitlines()[-1])
    return [
        Figure(
            f"vs_aibrix_{name}",
            min(result[name]["ratio"] for result in results.values()),
            at_least=_LIMITS[name],
            detail="; ".join(f"{size}: {result[name]['detail']}" for size, result in results.items()),
        )
        for name in _LIMITS
    ]


def _environment() -> Path:
    """Return the interpreter of AIBrix's environment, which is made if it isn't there."""
    python = _FOLDER / "bin" / "python"
    stamp = _FOLDER / "packages.json"
    wanted = json.dumps([sys.version, _PACKAGES])
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print("making an environment for AIBrix ...", file=sys.stderr, flush=True)
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(_FOLDER)])
    _run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", *_PACKAGES])
    # torch, numpy and what kvplug needs. After the environment's own packages, which win.
    (site,) = _FOLDER.glob("lib/python*/site-packages")
    (own,) = {path for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages")}
    (site / "zz-benchmark.pth").write_text(own + "\n", encoding="utf-8")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _sources() -> list[Path]:
    return sorted(path for pattern in ("*/src", "plugins/*/src") for path in ROOT.glob(pattern))


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        output = "\n".join((process.stdout + process.stderr).splitlines()[-30:])
        raise RuntimeError(f"{' '.join(command)} failed:\n{output}")
    return process.stdout
