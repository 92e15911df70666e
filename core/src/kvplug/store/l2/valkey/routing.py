"""Takes the commands of one call to the nodes that have their keys, and follows where those point."""

from __future__ import annotations

import select
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from kvplug.store.l2.tier import TierError
from kvplug.store.l2.valkey.deadline import Deadline
from kvplug.store.l2.valkey.exchange import Command, Exchange
from kvplug.store.l2.valkey.node import Node
from kvplug.store.l2.valkey.resp import ErrorReply, Reply, encode
from kvplug.store.l2.valkey.topology import Topology

__all__ = ["Router"]

#: Most times that a key is sent: to where it was, to where it has moved, and once more if it has moved again.
_ROUNDS = 3
#: Of the time that a call has, for a node of several: one that hangs must not cost what the others have answered.
_SHARE = 0.75
_ASKING = Command((encode(b"ASKING"),))

#: Indices of commands, by the node that they go to and whether it must be told that it was ASK that sent them.
_Groups: TypeAlias = "dict[tuple[Node, bool], list[int]]"
#: With its commands' indices, and whether each has an ASKING in front.
_UnderWay: TypeAlias = "tuple[Exchange, list[int], bool]"


class Router:
    """One call's commands on their ways.

    Args:
        topology: Who has which key.
        commands: One for each key.
        window: Most commands that are under way to one node.
        understood: Codes of error replies that are answers.

    """

    def __init__(
        self, topology: Topology, commands: Sequence[Command], window: int, understood: Collection[str] = ()
    ) -> None:
        self._topology = topology
        self._commands = commands
        self._window = window
        self._understood = understood
        self._outcomes: list[Reply | TierError] = [None] * len(commands)

    def run(
        self, deadline: Deadline, asked: Node | None = None, replies: Sequence[Reply] = ()
    ) -> list[Reply | TierError]:
        """Return the commands' replies, or why there is none.

        Args:
            deadline: By when.
            asked: Who was sent the commands already, and where some of them may have to go on from.
            replies: What it replied.

        Raises:
            TierError: There is one server, and it failed, or all of a cluster have.

        """
        topology = self._topology
        groups: _Groups = {}
        if asked is not None:
            self._sort(asked, list(range(len(replies))), replies, groups)
        elif topology.clustered:
            topology.refresh_if_due(deadline)
            groups = self._by_node()
        else:
            groups = {(topology.masters[0], False): list(range(len(self._commands)))}
        for _ in range(_ROUNDS):
            groups = self._round(groups, deadline)
            if not groups:
                break
        for (node, _), indices in groups.items():
            self._fail(indices, TierError(f"{node}: the key's slot keeps moving."))
        problem = next((outcome for outcome in self._outcomes if isinstance(outcome, TierError)), None)
        if problem is not None and not topology.usable():
            raise problem
        return self._outcomes

    def _by_node(self) -> _Groups:
        groups: _Groups = {}
        for index, command in enumerate(self._commands):
            node = self._topology.node(command.key)
            if node is None:
                self._outcomes[index] = TierError("no node of the cluster has the key's slot.")
            else:
                groups.setdefault((node, False), []).append(index)
        return groups

    def _round(self, groups: _Groups, deadline: Deadline) -> _Groups:
        """Send all, then read all, so that the nodes work at the same time; return what has to go elsewhere."""
        exchanges: list[_UnderWay] = []
        elsewhere: _Groups = {}
        try:
            for (node, asking), indices in groups.items():
                # When all nodes have failed nobody is spared: then it is the caller who leaves the tier alone.
                if self._topology.usable() and not node.ready():
                    self._fail(indices, node.problem or TierError(f"{node}: it is being tried by another call."))
                    continue
                exchange = self._exchange(node, indices, asking=asking)
                exchanges.append((exchange, indices, asking))
                try:
                    exchange.start(self._share(deadline))
                except TierError as problem:
                    self._topology.failed(node, problem)
                    self._fail(indices, problem)
                    exchanges.pop()[0].abandon()
            for (exchange, indices, asking), until in self._as_they_answer(exchanges, deadline):
                try:
                    replies = exchange.finish(until)
                except TierError as problem:  # noqa: PERF203
                    self._topology.failed(exchange.node, problem)
                    self._fail(indices, problem)
                else:
                    # Before each command that was asked for comes ASKING, with a reply of its own.
                    self._sort(exchange.node, indices, replies[asking :: 1 + asking], elsewhere)
        finally:
            for exchange, _, _ in exchanges:
                exchange.abandon()
        return elsewhere

    def _share(self, deadline: Deadline) -> Deadline:
        return deadline.part(_SHARE) if self._topology.clustered else deadline

    def _as_they_answer(
        self, exchanges: Sequence[_UnderWay], deadline: Deadline
    ) -> Iterator[tuple[_UnderWay, Deadline]]:
        """Yield exchanges in the order in which nodes begin to answer, and by when; at last those that don't.

        One after the other, a node that hangs would hold up the replies of others until their time has passed, too.
        """
        if len(exchanges) == 1:
            yield exchanges[0], self._share(deadline)
            return
        waiting = {item[0].fileno(): item for item in exchanges}
        answered = select.poll()
        for descriptor in waiting:
            answered.register(descriptor, select.POLLIN)
        patience = self._share(deadline)
        while waiting and (ready := answered.poll(patience.left() * 1000)):
            for descriptor, _ in ready:
                answered.unregister(descriptor)
                yield waiting.pop(descriptor), self._share(deadline)
        for item in waiting.values():
            yield item, Deadline(0)

    def _exchange(self, node: Node, indices: list[int], *, asking: bool) -> Exchange:
        commands = [self._commands[index] for index in indices]
        if asking:
            commands = [item for command in commands for item in (_ASKING, command)]
        return Exchange(node, commands, self._window * (1 + asking))

    def _sort(self, node: Node, indices: list[int], replies: Sequence[Reply], elsewhere: _Groups) -> None:
        """Keep the replies that are answers, and see what the others mean."""
        problem = None
        for index, reply in zip(indices, replies, strict=True):
            self._outcomes[index] = reply
            if not isinstance(reply, ErrorReply) or reply.code in self._understood:
                continue
            if reply.code in ("MOVED", "ASK"):
                other = self._topology.redirected(reply, node)
                if other is not None:
                    elsewhere.setdefault((other, reply.code == "ASK"), []).append(index)
                    continue
            problem = self._outcomes[index] = TierError(f"{node}: the server answers {str(reply)!r}.")
        if problem is None:
            node.worked()
        else:
            self._topology.failed(node, problem)

    def _fail(self, indices: list[int], problem: TierError) -> None:
        for index in indices:
            self._outcomes[index] = problem
