"""Time to the first token: after a hand-over against recomputing, and of the pair against one engine, by reuse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from statistics import median

from benchmarks.common.figures import Figure, spread
from benchmarks.pd import engine, servers
from benchmarks.pd.servers import tokens

__all__ = ["REUSED", "measure_handover", "measure_reuse"]

_LENGTHS = {"1k": 1024, "4k": 4096, "8k": 8000}

#: Shares of a prompt that are stored before, in percent.
REUSED = (0, 30, 60, 90)

_numbers = count()


def measure_handover(rounds: int, lengths: Sequence[str] = ("1k", "4k", "8k")) -> list[Figure]:
    """Measure the first token on the decode engine, of prompts that were prefilled elsewhere and that weren't.

    Args:
        rounds: How often.
        lengths: Of the prompts.

    """
    trio = servers.trio()
    figures = []
    for name in lengths:
        handed: list[float] = []
        computed: list[float] = []
        for _ in range(rounds):
            prompt = _prompt(_LENGTHS[name])
            loaded = trio.decode.loaded()
            answer, prefilled = trio.handed_over(prompt)
            handed.append(answer.ttft - prefilled)
            if (loaded := trio.decode.loaded() - loaded) < len(prompt) - 1:
                raise AssertionError(f"{loaded} of {len(prompt)} tokens were loaded")
            computed.append(trio.decode.decode(_prompt(_LENGTHS[name]), 1).ttft)
            trio.settle()
        ratios = [one / other for one, other in zip(handed, computed, strict=True)]
        figures.append(
            Figure(
                f"ttft_handover_vs_recompute_{name}",
                median(ratios),
                detail=f"{_LENGTHS[name]} tokens: {spread(ratios)}; {median(handed) * 1e3:.0f} ms from the prefill's "
                f"answer, {median(computed) * 1e3:.0f} ms recomputed",
            )
        )
    return figures


def measure_reuse(rounds: int, length: int = 4096, shares: Sequence[int] = REUSED) -> list[Figure]:
    """Measure the first token of prompts of which a part is stored, with the pair and with one engine.

    Args:
        rounds: How often.
        length: Tokens of the prompts.
        shares: Shares that are stored, in percent. The first is 0.

    """
    trio = servers.trio()
    trio.alone.pin(servers.CORES[0])
    copies = _copies(trio, rounds, -(-length // servers.BLOCK_SIZE))
    alone: list[float] = []
    pair: dict[int, list[float]] = defaultdict(list)
    local: dict[int, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for share in shares:
            shared = length * share // 100 // servers.BLOCK_SIZE * servers.BLOCK_SIZE
            prefix = _prompt(shared)
            if shared:
                # The decode engine stores it, so that the prefill engine can have it from the shared store only.
                trio.decode.decode(prefix, 1)
                trio.settle()
                trio.alone.decode(prefix, 1)
            loaded = trio.prefill.loaded()
            answer, _ = trio.handed_over(prefix + _prompt(length - shared))
            pair[share].append(answer.ttft)
            if trio.prefill.loaded() - loaded < shared:
                raise AssertionError(f"the prefill engine has loaded less than {shared} tokens")
            (local[share] if shared else alone).append(trio.alone.decode(prefix + _prompt(length - shared), 1).ttft)
            trio.settle()
    copy = median(copies)
    overheads = [one / (other + copy) - 1 for one, other in zip(pair[0], alone, strict=True)]
    plain = [one / other - 1 for one, other in zip(pair[0], alone, strict=True)]
    times = f"{_ms(pair[0])} ms with the pair, {_ms(alone)} ms with one engine, {copy * 1e3:.0f} ms for the copy"
    figures = [
        Figure("ttft_overhead_0pct", median(overheads), at_most=0.05, detail=f"{spread(overheads)}; {times}"),
        Figure("ttft_overhead_0pct_with_copy", median(plain), detail=f"{spread(plain)}; the copy isn't taken off"),
    ]
    for share in shares[1:]:
        ratios = [one / other for one, other in zip(pair[share], alone, strict=True)]
        ideal = [one / other for one, other in zip(local[share], alone, strict=True)]
        figures += [
            Figure(
                f"ttft_vs_one_engine_{share}pct",
                median(ratios),
                detail=f"{spread(ratios)}; {_ms(pair[share])} ms over {_ms(alone)} ms; with the prefix in vLLM's own "
                f"cache, one engine takes {_ms(local[share])} ms",
            ),
            Figure(
                f"ttft_one_engine_local_{share}pct", median(ideal), detail=f"{spread(ideal)}; what is left to compute"
            ),
        ]
    return figures


def _copies(trio: servers.Trio, rounds: int, blocks: int) -> list[float]:
    """Return the seconds in which the store alone writes and reads as many values, on the cores of the pair."""
    from benchmarks.common.processes import Child

    with Child("pd-copy-put") as put, Child("pd-copy-get") as get:
        sides = (put, get)
        for child, core in zip(sides, servers.CORES, strict=True):
            child.call(engine.use_store, trio.connector, core, servers.LITTLE)
        seconds = []
        for _ in range(rounds + 1):
            seed = f"copy {next(_numbers)}"
            written = put.call(engine.store_put, seed, blocks, blocks)
            seconds.append(written + get.call(engine.store_get, seed, blocks, blocks))
    return seconds[1:]


def _prompt(length: int) -> list[int]:
    return tokens(f"prompt {next(_numbers)}", length)


def _ms(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:.0f}"
