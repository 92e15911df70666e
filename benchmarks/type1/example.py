"""Loading, against vLLM's ExampleConnector."""

from __future__ import annotations

import tempfile
from statistics import median

from benchmarks.common.figures import Figure, spread
from benchmarks.common.processes import ROOT
from benchmarks.type1 import engine
from benchmarks.type1.model import MUCH_KV

__all__ = ["measure"]

#: Blocks of a prompt. They have 80 MiB of KV.
_BLOCKS = 64


def measure(prompts: int) -> list[Figure]:
    """Measure how long prompts' KV takes to get into the paged cache, of two engines in turns.

    Each prompt is computed, forgotten by vLLM, and asked for again, which is the load that counts. Asked for once more,
    it is loaded a second time. ExampleConnector keeps KV in files; the operating system has them in memory.
    """
    first: dict[str, list[float]] = {"theirs": [], "ours": []}
    again: dict[str, list[float]] = {"theirs": [], "ours": []}
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        theirs = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
        with (
            engine.open_engine("load-example", theirs, MUCH_KV) as example,
            engine.open_engine("load-type1", engine.type1("160MiB"), MUCH_KV) as ours,
        ):
            example.call(engine.watch_loads, "start_load_kv")
            ours.call(engine.watch_loads, "hook")
            num_bytes = _BLOCKS * ours.call(engine.block_bytes)
            num_tokens = _BLOCKS * engine.BLOCK_SIZE + engine.REST
            for number in range(prompts):
                for name, child in (("theirs", example), ("ours", ours)):
                    child.call(engine.ttft, f"load {number}", num_tokens=num_tokens)
                    for results in (first, again):
                        results[name].append(child.call(engine.loading, f"load {number}", num_tokens=num_tokens))
            used = ours.call(engine.stored_tokens_used)
    if used != 2 * prompts * _BLOCKS * engine.BLOCK_SIZE:
        raise AssertionError(f"{used} tokens of {prompts} prompts were hits")
    return [
        Figure(
            "load_vs_example", _ratio(first), at_least=5, detail=f"{num_bytes >> 20} MiB, first load: {_detail(first)}"
        ),
        Figure("load_again_vs_example", _ratio(again), detail=f"second load: {_detail(again)}"),
    ]


def _ratio(seconds: dict[str, list[float]]) -> float:
    return median(seconds["theirs"]) / median(seconds["ours"])


def _detail(seconds: dict[str, list[float]]) -> str:
    return (
        f"median of {spread(seconds['theirs'], 1e3)} ms in start_load_kv, over median of "
        f"{spread(seconds['ours'], 1e3)} ms in the hook"
    )
