"""Making a worker's clients of what engines with other parallel sizes have stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvplug.errors import UnsupportedError
from kvplug.paged.shares import Part, cut, parts_of
from kvplug.store.l2.peer_values import Scratch
from kvplug.store.l2.peers import PeerClient

if TYPE_CHECKING:
    import torch

    from kvplug.kv_groups import KVGroup
    from kvplug.namespace import Shard
    from kvplug.paged.facts import PeerFacts
    from kvplug.paged.groups import PagedGroups
    from kvplug.stats import Stats
    from kvplug.store.l2.client import L2Client

__all__ = ["make_peers"]


def make_peers(
    facts: PeerFacts,
    clients: Sequence[L2Client],
    stats: Stats,
    *,
    paged: PagedGroups,
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[KVGroup],
    layout: str,
    namespace: str,
) -> tuple[list[PeerClient], list[str]]:
    """Make the clients that read what engines with other parallel sizes have stored.

    Args:
        facts: What vLLM says of this rank, and of theirs.
        clients: The tiers' clients, in order.
        stats: Counts what happens.
        paged: This rank's caches.
        kv_caches: The tensors that `paged` was made of.
        groups: The KV-cache groups.
        layout: What `make_clients` was told.
        namespace: The setting `l2_namespace`.

    Returns:
        For each of these engines, in the order of `facts.peers`, a client for each tier: where nothing can be read of
        them, clients that find nothing, so that all ranks and the scheduler count alike. And why nothing can be read,
        a sentence for each such engine.

    """
    if not layout.endswith(paged.layout):
        msg = f"{layout!r} doesn't end with how blocks are laid out"
        raise ValueError(msg)
    sizes = layout[: -len(paged.layout)]
    found: list[Sequence[Part]] = []
    reasons = []
    for (tp_size, pp_size), peer in zip(facts.layouts, facts.peers, strict=True):
        parts = (
            peer
            if isinstance(peer, str)
            else _parts_or_reason(facts, peer, paged=paged, kv_caches=kv_caches, groups=groups, sizes=sizes)
        )
        if isinstance(parts, str):
            reasons.append(
                f"What engines with tensor-parallel size {tp_size} and pipeline-parallel size {pp_size} have stored in "
                f"L2 can't be read here: {parts.rstrip('.')}."
            )
        found.append(() if isinstance(parts, str) else parts)
    scratch = Scratch([part for parts in found for part in parts])
    peers = [
        PeerClient(client, parts, stats, namespace=namespace, scratch=scratch) for parts in found for client in clients
    ]
    return peers, reasons


def _parts_or_reason(
    facts: PeerFacts,
    peer: Sequence[Shard],
    *,
    paged: PagedGroups,
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[KVGroup],
    sizes: str,
) -> Sequence[Part] | str:
    try:
        return parts_of(facts, peer, cut(facts, paged, kv_caches, groups), sizes)
    except UnsupportedError as error:
        return str(error)
