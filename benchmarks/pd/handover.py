"""Bytes per second of a hand-over, against what the store alone reaches with the same values on the same cores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from statistics import median

from benchmarks.common.figures import Figure, spread
from benchmarks.common.processes import Child
from benchmarks.pd import engine, servers
from benchmarks.type1.model import Shape

__all__ = ["measure"]

#: As much KV per token as the servers' model, 20 KiB, and less to compute.
_LITTLE_COMPUTE = Shape(hidden=128, intermediate=128, layers=10, heads=4, kv_heads=4, dtype="float32")

#: Tokens of the prompts. The last block isn't full.
_LENGTHS = {"4k": 4106, "8k": 8010}

#: Room for any of them.
_SLOTS = 256

_numbers = count()


def measure(rounds: int, lengths: Sequence[str] = ("4k", "8k")) -> list[Figure]:
    """Hand prompts over between two engines, and write and read as many values with the store alone, in turns.

    Args:
        rounds: How often.
        lengths: Of the prompts.

    """
    with (
        servers.store_folder() as folder,
        Child("pd-prefill") as prefill,
        Child("pd-decode") as decode,
    ):
        # Half of it may be on its way to or from the store.
        connector = servers.connector(folder, l1_size_per_rank="384MiB", handover_timeout=60)
        children = (prefill, decode)
        for child, core in zip(children, servers.CORES, strict=True):
            child.call(
                engine.start,
                _LITTLE_COMPUTE,
                connector,
                core,
                num_blocks=2 * _SLOTS,
                max_tokens=8192,
                # Whole prompts in one step, so that nothing is stored before the prefill ends.
                budget=8192,
            )
        pair = _Pair(prefill, decode)
        for _ in range(5):  # every slot, and every block, has been used once
            pair.hand_over(_LENGTHS["4k"])
        pair.alone(1)
        figures = []
        computed: list[int] = []
        for name in lengths:
            tokens = _LENGTHS[name]
            blocks = -(-tokens // servers.BLOCK_SIZE)
            runs = [(pair.hand_over(tokens), pair.alone(blocks)) for _ in range(rounds)]
            computed += [run.computed for run, _ in runs]
            figures += _figures(name, tokens, blocks * pair.value_bytes, runs)
    worst = max(computed)
    detail = f"most of {len(computed)} prompts of {' and '.join(str(_LENGTHS[name]) for name in lengths)} tokens"
    return [Figure("recomputed_tokens_full_hit", worst, at_most=1, detail=detail), *figures]


class _Run:
    """One hand-over: its steps, each in seconds from the end of the prefill's last step."""

    def __init__(self, prefill: Sequence[engine.Span], decode: Sequence[engine.Span], computed: int) -> None:
        self.computed = computed
        start = next(begin for name, begin, _ in prefill if name == "end")

        def last(name: str, spans: Sequence[engine.Span]) -> float:
            return max(end for one, _, end in spans if one == name) - start

        def first(name: str, spans: Sequence[engine.Span]) -> float:
            return min(begin for one, begin, _ in spans if one == name) - start

        self.seconds = last("scatter", decode)
        self.steps = {
            "in the slab": last("gather", prefill),
            "answered": last("answer", prefill),
            "request at the decode engine": first("request", decode),
            "first put": first("put", prefill),
            "last put": last("put", prefill),
            "first lookup": first("exists", decode),
            "first get": first("get", decode),
            "last get": last("get", decode),
            "load": first("scatter", decode),
            "loaded": self.seconds,
            "first token": last("answer", decode),
        }


class _Pair:
    """The two engines, and this process as their router."""

    def __init__(self, prefill: Child, decode: Child) -> None:
        self._prefill, self._decode = prefill, decode
        self.value_bytes = engine.value_bytes(_LITTLE_COMPUTE)

    def hand_over(self, tokens: int) -> _Run:
        seed = f"prompt {next(_numbers)}"
        params, spans = self._prefill.call(engine.prefill, seed, tokens)
        computed, decoded = self._decode.call(engine.decode, seed, tokens, params)
        spans += self._prefill.call(engine.settle)
        self._decode.call(engine.settle)
        return _Run(spans, decoded, computed)

    def alone(self, blocks: int) -> tuple[float, float]:
        """Return the seconds that writing took, and that reading took."""
        seed = f"alone {next(_numbers)}"
        put = self._prefill.call(engine.store_put, seed, blocks, _SLOTS)
        return put, self._decode.call(engine.store_get, seed, blocks, _SLOTS)


def _figures(name: str, tokens: int, nbytes: int, runs: Sequence[tuple[_Run, tuple[float, float]]]) -> list[Figure]:
    ratios = [sum(alone) / run.seconds for run, alone in runs]
    ours, theirs = (
        [nbytes / seconds / 1e9 for seconds in side]
        for side in zip(*[(run.seconds, sum(alone)) for run, alone in runs], strict=True)
    )
    steps = ", ".join(f"{step} {median(run.steps[step] for run, _ in runs) * 1e3:.0f}" for step in runs[0][0].steps)
    puts, gets = (median(alone[side] for _, alone in runs) * 1e3 for side in (0, 1))
    suffix = "" if name == "8k" else f"_{name}"
    return [
        Figure(
            f"handover_bytes_vs_store{suffix}",
            median(ratios),
            at_least=0.8,
            detail=f"{tokens} tokens, {nbytes / 1e6:.0f} MB: {spread(ratios)}; medians: {median(ours):.2f} GB/s over "
            f"{median(theirs):.2f} GB/s of the store alone (put {puts:.0f} ms, get {gets:.0f} ms)",
        ),
        Figure(
            f"handover_ms_{name}",
            median(run.seconds for run, _ in runs) * 1e3,
            "ms",
            detail=f"ms after the end of the prefill's step: {steps}",
        ),
    ]
