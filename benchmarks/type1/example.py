"""Loading, against vLLM's ExampleConnector."""

from __future__ import annotations

import tempfile

from benchmarks.type1 import engine
from benchmarks.type1.figures import Figure, spread
from benchmarks.type1.processes import ROOT

__all__ = ["measure"]


def measure(runs: int) -> list[Figure]:
    """Measure how long one prompt's KV takes to get into the paged cache, of two engines in turns.

    ExampleConnector keeps it in files, which the operating system has in memory by then.
    """
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        theirs = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
        with (
            engine.open_engine("load-example", theirs) as example,
            engine.open_engine("load-type1", engine.TYPE1) as ours,
        ):
            for child, where in ((example, "start_load_kv"), (ours, "hook")):
                child.call(engine.ttft, "load")
                child.call(engine.watch_loads, where)
            num_bytes = engine.PROMPT_TOKENS // engine.BLOCK_SIZE * ours.call(engine.block_bytes)
            example_seconds, our_seconds = [], []
            for _ in range(runs):
                example_seconds.append(example.call(engine.loading, "load"))
                our_seconds.append(ours.call(engine.loading, "load"))
            used = ours.call(engine.stored_tokens_used)
    if used != runs * (engine.PROMPT_TOKENS // engine.BLOCK_SIZE) * engine.BLOCK_SIZE:
        raise AssertionError(f"{used} tokens in {runs} runs were hits")
    return [
        Figure(
            "load_vs_example",
            min(example_seconds) / min(our_seconds),
            at_least=5,
            detail=f"{num_bytes >> 20} MiB: {min(example_seconds) * 1e3:.1f} ms in start_load_kv (best of "
            f"{spread(example_seconds, 1e3)}) over {min(our_seconds) * 1e3:.2f} ms in the hook (best of "
            f"{spread(our_seconds, 1e3)})",
        )
    ]
