"""`kv_transfer_params`: what routers, prefill engines and decode engines tell each other of a request.

The keys are those of vLLM's Nixl connector, which routers know. What kvplug adds is in one object, `kvplug`. Clients
can send anything here, so nothing is believed that matters: what is loaded is decided by the tokens and the store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["VERSION", "Handover", "answer", "is_deep", "read"]

#: Version of the object `kvplug`. Raised when its meaning changes.
VERSION = 1


@dataclass(frozen=True)
class Handover:
    """What a request's parameters come to.

    Attributes:
        role: Whether the request is to be prefilled for another engine, or was prefilled by another one; None if it is
            like any other.
        num_tokens: Tokens from the start that the prefill engine has stored, or is storing; None if it doesn't say.
        problem: Why a request that was prefilled isn't waited for: `namespace` if by another model, `version` if by
            another kvplug, `layout` if on ranks whose values aren't read here; else empty.

    """

    role: Literal["prefill", "decode"] | None = None
    num_tokens: int | None = None
    problem: str = ""


def read(params: object, namespace: bytes, layouts: Collection[tuple[int, int]] = ()) -> Handover:
    """Read a request's `kv_transfer_params`, whatever they are. Never raises.

    Args:
        params: What the client sent.
        namespace: This engine's own, 32 bytes (`kvplug.namespace.namespace_fingerprint`).
        layouts: Tensor- and pipeline-parallel sizes of engines whose values are read; empty for all.

    """
    if not isinstance(params, dict):
        return Handover()
    prefill, decode = params.get("do_remote_decode") is True, params.get("do_remote_prefill") is True
    if prefill == decode:
        return Handover()
    return Handover("prefill") if prefill else _of_decode(params, namespace, layouts)


def is_deep(params: object, levels: int = 32) -> bool:
    """Say whether objects or lists lie in each other to more levels than anybody means.

    vLLM pickles a request's parameters for its workers, and some hundred levels end the engine.
    """
    level = [params]
    for _ in range(levels):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return False
    return True


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _of_decode(params: dict[str, Any], namespace: bytes, layouts: Collection[tuple[int, int]]) -> Handover:
    said = params.get("kvplug")
    if not isinstance(said, dict):
        return Handover("decode")
    if said.get("version") != VERSION:
        return Handover("decode", problem="version")
    if said.get("namespace") != namespace.hex():
        return Handover("decode", problem="namespace")
    sizes = (params.get("tp_size"), said.get("pp_size"))
    if layouts and all(map(_is_count, sizes)) and sizes not in layouts:
        return Handover("decode", problem="layout")
    tokens = said.get("num_stored_tokens")
    return Handover("decode", tokens if _is_count(tokens) else None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def answer(
    request: Any, namespace: bytes, *, engine_id: str, layout: tuple[int, int], num_stored_tokens: int
) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a prefill engine's answer. A new dict: vLLM adds to it.

    Args:
        request: vLLM's `Request`.
        namespace: See `read`.
        engine_id: vLLM's name for this engine.
        layout: Its tensor- and pipeline-parallel size.
        num_stored_tokens: Tokens from the start that are stored, or are being stored.

    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        # Nobody is to be asked for blocks by number, and nobody waits to be asked.
        "remote_block_ids": [],
        "remote_host": "",
        "remote_port": 0,
        "remote_engine_id": engine_id,
        "remote_request_id": request.request_id,
        "tp_size": layout[0],
        "kvplug": {
            "version": VERSION,
            "namespace": namespace.hex(),
            "pp_size": layout[1],
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_stored_tokens": num_stored_tokens,
        },
    }
