"""Faults that a soak's checks have to notice: their controls."""

from __future__ import annotations

import enum
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import llm as engine

#: Bytes of a block of the test model `llama`: layers, K and V, heads, head size, tokens, float32.
BLOCK_BYTES = 4 * 2 * 2 * 32 * 32 * 4


class Leak(enum.Enum):
    """A fault to put in on purpose."""

    REQUESTS = "the scheduler half isn't told of finished requests"
    PINS = "loads keep their pins"
    MEMORY = "a block's bytes stay for each request"
    OBJECTS = "an object stays for each request"
    DESCRIPTORS = "a file stays open for each request"
    THREADS = "a thread stays for each request"
    CONTENT = "loads bring other bytes"
    DISK = "a block's bytes stay in L2's folder for each request"


def put_in(leak: Leak, llm: Any) -> Callable[[], None]:
    """Put a fault into a live engine; return what to call for each request."""
    match leak:
        case Leak.REQUESTS:
            engine.scheduler(llm).connector.scheduler.finish = lambda _request: None
        case Leak.PINS:
            engine.connector(llm).worker.tier.allocator.unpin = lambda _refs: None
        case Leak.CONTENT:
            _spoil_loads(engine.connector(llm).worker.paged)
        case Leak.DISK:
            (tier,) = (client.tier for client in engine.connector(llm).worker.store.clients)
            return _per_request(leak, [], Path(tier.place))
        case _:
            return _per_request(leak, [])
    return lambda: None


def _spoil_loads(paged: Any) -> None:
    inner = paged.scatter

    def scatter(slab: Any, slots: Any, block_ids: Any) -> Any:
        for slot in slots:
            slab.view(slot)[:] = slab.view(slot)[::-1]
        return inner(slab, slots, block_ids)

    paged.scatter = scatter


def _per_request(leak: Leak, kept: list[Any], folder: Path | None = None) -> Callable[[], None]:
    def keep() -> None:
        match leak:
            case Leak.MEMORY:
                kept.append(b"\1" * BLOCK_BYTES)
            case Leak.OBJECTS:
                kept.append(_Kept(len(kept)))
            case Leak.DESCRIPTORS:
                kept.append(os.dup(0))
            case Leak.DISK:
                assert folder is not None
                (folder / uuid.uuid4().hex).write_bytes(b"\1" * BLOCK_BYTES)
            case Leak.THREADS:
                threading.Thread(target=threading.Event().wait, daemon=True).start()

    return keep


class _Kept:
    def __init__(self, number: int) -> None:
        self.number = number
