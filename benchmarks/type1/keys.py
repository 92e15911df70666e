"""Keys of a long prompt's blocks."""

from __future__ import annotations

import random
import time

from benchmarks.common.figures import Figure, spread

__all__ = ["measure"]

_TOKENS = 128 * 1024
_BLOCK_SIZE = 16


def measure(repeats: int) -> list[Figure]:
    """Measure all keys of a prompt of 128k tokens, then those of the block after it.

    Tokens are read through the view that vLLM's requests give of theirs.
    """
    from vllm.v1.utils import ConstantList

    from kvplug.identity import RequestIdentity
    from kvplug.keys import KeyChain

    generator = random.Random(0)  # noqa: S311
    tokens = [generator.randrange(150_000) for _ in range(_TOKENS + _BLOCK_SIZE)]
    whole, further = [], []
    for _ in range(repeats):
        mine = tokens[:_TOKENS]
        view = ConstantList(mine)
        chain = KeyChain(bytes(32), _BLOCK_SIZE, RequestIdentity())
        whole.append(_seconds(chain, view))
        mine += tokens[_TOKENS:]
        further.append(_seconds(chain, view))
        if len(chain.keys) != len(tokens) // _BLOCK_SIZE:
            raise AssertionError(f"{len(chain.keys)} keys of {len(tokens)} tokens")
    return [
        Figure(
            "keys_128k_ms",
            min(whole) * 1e3,
            "ms",
            at_most=50,
            detail=f"best of {spread(whole, 1e3)}; {_TOKENS} tokens in blocks of {_BLOCK_SIZE}",
        ),
        Figure(
            "keys_next_block_us",
            min(further) * 1e6,
            "us",
            detail=f"best of {spread(further, 1e6)}; one more block of the same request",
        ),
    ]


def _seconds(chain: object, tokens: object) -> float:
    start = time.thread_time()
    chain.extend(tokens)  # type: ignore[attr-defined]
    return time.thread_time() - start
