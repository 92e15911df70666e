"""Which server has which key: one, or the masters of a cluster."""

from __future__ import annotations

import binascii
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

from kvplug.log import RateLimited, get_logger
from kvplug.store.l2.tier import TierError
from kvplug.store.l2.valkey.connection import Connection
from kvplug.store.l2.valkey.deadline import Deadline
from kvplug.store.l2.valkey.exchange import Command, Exchange
from kvplug.store.l2.valkey.node import Node
from kvplug.store.l2.valkey.resp import ErrorReply, Reply, encode
from kvplug.store.l2.valkey.url import Address, Target

__all__ = ["SLOTS", "Topology", "ask", "slot_of"]

logger = get_logger(__name__)

#: Slots of a cluster.
SLOTS = 16384
_CLUSTER_SLOTS = Command((encode(b"CLUSTER", b"SLOTS"),))
#: Of the time that a call has, for asking who has which slot.
_SHARE = 0.25


def slot_of(key: bytes) -> int:
    """Return a key's slot, of its part in braces if it has one, as the servers do."""
    start = key.find(b"{")
    if start >= 0:
        stop = key.find(b"}", start + 1)
        if stop > start + 1:
            key = key[start + 1 : stop]
    return binascii.crc_hqx(key, 0) % SLOTS


def ask(node: Node, commands: list[Command], deadline: Deadline) -> list[Reply]:
    """Send commands to one node and return the replies.

    Raises:
        TierError: It doesn't answer.

    """
    exchange = Exchange(node, commands, len(commands))
    try:
        exchange.start(deadline)
        return exchange.finish(deadline)
    finally:
        exchange.abandon()


class Topology:
    """Who has which key.

    Args:
        target: The server, or nodes of the cluster.
        connection: Makes a connection that isn't connected yet.

    """

    #: Least seconds between two looks at the slots.
    refresh_seconds: ClassVar[float] = 0.5

    def __init__(self, target: Target, connection: Callable[[Address], Connection]) -> None:
        self._target = target
        self._connection = connection
        self._warnings = RateLimited(logger)
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._closed = False
        # By slot; empty where there is one server.
        self._slots: list[Node | None] = []
        self._moved = False
        self._refresh_at = 0.0
        #: The servers that values are on.
        self.masters: list[Node] = []

    @property
    def clustered(self) -> bool:
        """Whether there are several servers."""
        return bool(self._slots)

    def load(self, deadline: Deadline) -> None:
        """Ask the seeds, one after the other, until one says what there is.

        Raises:
            TierError: None does.

        """
        problems: list[TierError] = []
        seeds = self._target.seeds
        for index, seed in enumerate(seeds):
            try:
                return self._look(self._node(seed), deadline.part(1 / (len(seeds) - index)))
            except TierError as problem:  # noqa: PERF203
                problems.append(problem)
        raise problems[0]

    def node(self, key: bytes) -> Node | None:
        """Return the node that has a key; None if none has its slot."""
        slots = self._slots
        return slots[slot_of(key)] if slots else self.masters[0]

    def usable(self) -> bool:
        """Whether there is a cluster of which a part works."""
        return self.clustered and any(master.problem is None for master in self.masters)

    def redirected(self, reply: ErrorReply, asked: Node) -> Node | None:
        """Return the node that a MOVED or ASK names; remember it, if it is for good."""
        try:
            _, slot, place = reply.text.split(" ")[:3]
            host, _, port = place.rpartition(":")
            node = self._node(Address(host or asked.address.host, int(port)))
            if reply.code == "MOVED":
                with self._lock:
                    self._moved = True
                    # A server that didn't let us see the slots turns out to be of a cluster.
                    self._slots = self._slots or [asked] * SLOTS
                    self._slots[int(slot)] = node
                    if node not in self.masters:
                        self.masters = [*self.masters, node]
        except (ValueError, IndexError):
            return None
        return node

    def refresh_if_due(self, deadline: Deadline) -> None:
        """Look at the slots again if a node failed or slots have moved, and not more than a moment ago."""
        if not self.clustered or not (self._moved or any(master.problem for master in self.masters)):
            return
        if time.monotonic() < self._refresh_at or not self._refreshing.acquire(blocking=False):
            return
        try:
            self._refresh_at = time.monotonic() + self.refresh_seconds
            self._moved = False
            self._refresh(deadline.part(_SHARE))
        finally:
            self._refreshing.release()

    def _refresh(self, deadline: Deadline) -> None:
        for node in self._informants():
            try:
                self._look(node, deadline)
            except TierError as problem:  # noqa: PERF203
                node.failed(problem)
            else:
                return

    def _informants(self) -> Iterator[Node]:
        """Yield who may know the slots: who works, and if nobody does, all."""
        nodes = list(dict.fromkeys([*self.masters, *self._nodes.values(), *map(self._node, self._target.seeds)]))
        working = [node for node in nodes if node.problem is None]
        yield from working or [node for node in nodes if node.ready()]

    def _look(self, node: Node, deadline: Deadline) -> None:
        (reply,) = ask(node, [_CLUSTER_SLOTS], deadline)
        if isinstance(reply, list):
            self._take(node, reply)
        elif not self.clustered:
            # One server says that it's no cluster; one that may not say is taken for one until it says MOVED.
            self.masters = [node]

    def _take(self, asked: Node, ranges: list[Reply]) -> None:
        slots: list[Node | None] = [None] * SLOTS
        for item in ranges:
            match item:
                case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                    # No host, or a question mark, means the one that was asked.
                    name = asked.address.host if not host or host == b"?" else host.decode()
                    slots[first : last + 1] = [self._node(Address(name, port))] * (last + 1 - first)
                case _:
                    raise TierError(f"{asked}: CLUSTER SLOTS is answered unintelligibly; check that it is a cluster.")
        masters = list(dict.fromkeys(node for node in slots if node is not None))
        if not masters:
            raise TierError(f"{asked}: the cluster has no slots; create it with --cluster create.")
        uncovered = slots.count(None)
        if uncovered:
            self._warnings.warning(
                "slots", "%d of the %d slots of the Valkey cluster %s have no server.", uncovered, SLOTS, self._target
            )
        with self._lock:
            self._slots, self.masters = slots, masters
            keep = {node.address for node in masters} | set(self._target.seeds)
            gone = [self._nodes.pop(address) for address in list(self._nodes) if address not in keep]
        for node in gone:
            node.close(interrupt=False)

    def _node(self, address: Address) -> Node:
        with self._lock:
            if self._closed:
                raise TierError(f"{address}: the tier is closed.")
            if address not in self._nodes:
                self._nodes[address] = Node(address, self._connection)
            return self._nodes[address]

    def failed(self, node: Node, problem: TierError) -> None:
        """Note that a node failed, and say so once in a while: its keys are misses, which nobody else would notice."""
        node.failed(problem)
        if self.usable():
            self._warnings.warning(
                node.address, "A node of the Valkey cluster failed; its keys are misses meanwhile. %s", problem
            )

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()
