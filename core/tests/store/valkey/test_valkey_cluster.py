"""A cluster whose slots move and whose nodes die."""

from __future__ import annotations

import binascii
import logging
import random
import re

import pytest

from kvplug.store.l2.tier import TierError, TierTimeoutError
from kvplug.store.l2.valkey.node import Node
from kvplug.store.l2.valkey.topology import SLOTS, Topology, slot_of
from support.valkey import HOST, until

T = 10.0
KEYS = [b"%d" % number for number in range(60)]
VALUES = [memoryview(bytearray(random.Random(number).randbytes(2000))) for number in range(60)]


def test_slots_are_the_servers():
    """A key's slot is CRC16 of it, or of its first part in braces if that isn't empty."""
    assert slot_of(b"123456789") == 0x31C3
    assert slot_of(b"") == 0
    assert slot_of(b"{user1000}.following") == slot_of(b"{user1000}.followers") == slot_of(b"user1000")
    assert slot_of(b"foo{}{bar}") == binascii.crc_hqx(b"foo{}{bar}", 0) % SLOTS
    assert slot_of(b"foo{{bar}}zap") == slot_of(b"{bar")
    assert slot_of(b"foo{bar}{zap}") == slot_of(b"bar")
    assert slot_of(b"}{") != slot_of(b"")


@pytest.fixture(scope="module")
def kept_cluster(start_cluster):
    """Return a cluster that is kept for other tests."""
    return start_cluster()


@pytest.fixture
def cluster(kept_cluster, monkeypatch):
    """Return a cluster of three masters, all up and empty; the tier tries a failed node again at once."""
    monkeypatch.setattr(Node, "pauses", (0.02, 0.02))
    monkeypatch.setattr(Topology, "refresh_seconds", 0.0)
    for server in kept_cluster.servers:
        if server.running:
            server.resume()
        else:
            server.start()
    until(lambda: all(b"cluster_state:ok" in kept_cluster.info(server) for server in kept_cluster.servers))
    until(lambda: all(_complete(server) for server in kept_cluster.servers))
    for server in kept_cluster.servers:
        server.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
        server.command("FLUSHALL", "SYNC")
    yield kept_cluster
    for server in kept_cluster.servers:
        if server.running:
            server.resume()


def _complete(server):
    reply = server.command("CLUSTER", "SLOTS")
    return sum(last - first + 1 for first, last, *_ in reply) == SLOTS and b"fail" not in server.command(
        "CLUSTER", "NODES"
    )


def read(tier, keys=KEYS, timeout=T):
    buffers = [memoryview(bytearray(2000)) for _ in keys]
    found = tier.get(keys, buffers, timeout)
    return [None if count is None else buffer[:count] for count, buffer in zip(found, buffers, strict=True)]


def _moved(server):
    """Return how often a server has said MOVED."""
    found = re.search(rb"errorstat_MOVED:count=(\d+)", server.command("INFO", "errorstats"))
    return int(found[1]) if found else 0


def owner(cluster, key):
    """Return the index of the master that has a key at first."""
    return min(slot_of(b"kvplug:" + key) // 5461, 2)


def expected(cluster, down):
    """Return what is read while one master is down."""
    return [None if owner(cluster, key) == down else value for key, value in zip(KEYS, VALUES, strict=True)]


@pytest.mark.server
def test_each_key_is_on_its_master(cluster, make_tier):
    """Keys are spread over the masters, straight away, and usage is what all of them hold."""
    before = [_moved(server) for server in cluster.servers]
    tier = make_tier(cluster.servers[1].port)
    assert tier.put(KEYS, VALUES, T) == [True] * 60
    held = [server.command("DBSIZE") for server in cluster.servers]
    assert held == [sum(owner(cluster, key) == index for key in KEYS) for index in range(3)]
    assert all(held)
    assert read(tier) == VALUES
    usage = tier.usage(T)
    assert usage.entries == 60
    assert usage.used_bytes > 60 * 2000
    assert [_moved(server) for server in cluster.servers] == before


@pytest.mark.server
def test_slots_are_those_that_the_server_says(cluster):
    """Whatever a key is, braces in all places included, its slot is the one that the server looks for it in."""
    choices = random.Random(1)
    for _ in range(200):
        key = bytes(choices.choice(b"{}{}\0\xffab") for _ in range(choices.randrange(1, 12)))
        assert cluster.servers[0].command("CLUSTER", "KEYSLOT", key) == slot_of(key), key


@pytest.mark.server
@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_a_master_that_is_down_costs_only_its_keys(cluster, make_tier, caplog, fault):
    """Its keys are misses and aren't kept; all others are served, in the same calls; then it is back."""
    tier = make_tier(cluster.url)
    assert all(tier.put(KEYS, VALUES, T))
    getattr(cluster.servers[1], fault)()
    for _ in range(3):
        assert read(tier, timeout=0.4) == expected(cluster, down=1)
        assert tier.exists(KEYS, 0.4) == [value is not None for value in expected(cluster, down=1)]
        assert tier.put(KEYS, VALUES, 0.4) == [value is not None for value in expected(cluster, down=1)]
        tier.delete([key for key in KEYS if owner(cluster, key) == 1], 0.4)
    warnings = [record for record in caplog.records if "its keys are misses" in record.message]
    assert len(warnings) == 1
    assert f"{HOST}:{cluster.servers[1].port}" in warnings[0].message
    if fault == "kill":
        cluster.servers[1].start()
    else:
        cluster.servers[1].resume()
    until(lambda: all(tier.put(KEYS, VALUES, T)))
    assert read(tier) == VALUES


@pytest.mark.server
def test_a_node_that_failed_is_left_alone_for_a_while(cluster, make_tier, monkeypatch):
    """A node that hangs costs one call its wait; the next ones go on without it, and without new connections to it."""
    monkeypatch.setattr(Node, "pauses", (1000.0, 1000.0))
    tier = make_tier(cluster.url)
    assert all(tier.put(KEYS, VALUES, T))
    cluster.servers[2].pause()
    assert read(tier, timeout=0.4) == expected(cluster, down=2)
    dialled = []
    original = Node.dial
    monkeypatch.setattr(Node, "dial", lambda node, deadline: (dialled.append(node), original(node, deadline))[1])
    for _ in range(20):
        # Waiting for the node would take all of the time.
        assert read(tier, timeout=1000.0) == expected(cluster, down=2)
    assert cluster.servers[2].port not in [node.address.port for node in dialled]


@pytest.mark.server
def test_all_nodes_down_is_an_error(cluster, make_tier):
    """When no node is left calls fail, and when they are back they work."""
    tier = make_tier(cluster.url)
    assert all(tier.put(KEYS, VALUES, T))
    for server in cluster.servers:
        server.kill()
    for _ in range(3):
        with pytest.raises(TierError, match=f"{HOST}:"):
            read(tier, timeout=1000.0)
    with pytest.raises(TierError, match=f"{HOST}:{cluster.servers[0].port}: can't connect"):
        make_tier(cluster.url)
    for server in cluster.servers:
        server.start()

    def works():
        try:
            return all(tier.put(KEYS, VALUES, T))
        except TierError:
            return False

    until(works)
    assert read(tier) == VALUES


@pytest.mark.server
def test_all_nodes_hanging_is_a_timeout(cluster, make_tier):
    """When all hang the call ends by its deadline, as a timeout."""
    tier = make_tier(cluster.url)
    for server in cluster.servers:
        server.pause()
    for _ in range(2):
        with pytest.raises(TierTimeoutError):
            read(tier, timeout=0.3)


@pytest.mark.server
def test_a_cluster_that_wants_all_masters_is_an_error_when_one_is_down(cluster, make_tier):
    """With cluster-require-full-coverage all nodes refuse: that is an error of the tier, with the cluster's words."""
    for server in cluster.servers:
        server.command("CONFIG", "SET", "cluster-require-full-coverage", "yes")
    tier = make_tier(cluster.url)
    cluster.servers[1].kill()
    until(lambda: all(b"cluster_state:fail" in cluster.info(cluster.servers[index]) for index in (0, 2)))
    keys = [key for key in KEYS if owner(cluster, key) != 1]

    def refused():
        try:
            read(tier, keys)
        except TierError as error:
            return "CLUSTERDOWN" in str(error)
        return False

    until(refused)
    for server in (cluster.servers[0], cluster.servers[2]):
        server.command("CONFIG", "SET", "cluster-require-full-coverage", "no")


@pytest.mark.server
def test_slots_that_move_are_followed(cluster, make_tier):
    """While a slot moves its keys are found where they are (ASK), and afterwards where it went (MOVED)."""
    source, target = cluster.servers[0], cluster.servers[2]
    key = next(key for key in KEYS if owner(cluster, key) == 0)
    slot = str(slot_of(b"kvplug:" + key))
    tier = make_tier(cluster.url)
    assert all(tier.put(KEYS, VALUES, T))
    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id(source))
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id(target))
    try:
        assert read(tier) == VALUES
        source.command("MIGRATE", HOST, str(target.port), b"kvplug:" + key, "0", "5000")
        assert read(tier) == VALUES
        assert tier.exists(KEYS, T) == [True] * 60
        tier.delete([key], T)
        assert target.command("DBSIZE") == sum(owner(cluster, key) == 2 for key in KEYS)
        assert tier.put([key], [VALUES[KEYS.index(key)]], T) == [True]
        for server in (target, source, cluster.servers[1]):
            server.command("CLUSTER", "SETSLOT", slot, "NODE", cluster.id(target))
        assert read(tier) == VALUES
        moved = _moved(source)
        assert moved
        assert read(tier) == VALUES
        assert _moved(source) == moved
    finally:
        for server in (source, target):
            server.command("CLUSTER", "SETSLOT", slot, "STABLE")
        source.command("FLUSHALL", "SYNC")
        target.command("FLUSHALL", "SYNC")
        for server in (source, target, cluster.servers[1]):
            server.command("CLUSTER", "SETSLOT", slot, "NODE", cluster.id(source))


@pytest.mark.server
def test_a_user_who_may_not_see_the_slots_is_led_to_them(cluster, make_tier):
    """Without the right to CLUSTER SLOTS a tier learns from the servers' MOVED which node has which slot."""
    for server in cluster.servers:
        server.command("ACL", "SETUSER", "alice", "on", ">pw", "~*", "+get", "+set", "+ping", "+asking")
    tier = make_tier(f"valkey://alice:pw@{HOST}:{cluster.servers[0].port}")
    assert tier.put(KEYS, VALUES, T) == [True] * 60
    # It has learnt them: nobody is sent elsewhere again.
    moved = [_moved(server) for server in cluster.servers]
    assert any(moved)
    assert read(tier) == VALUES
    assert [_moved(server) for server in cluster.servers] == moved


@pytest.mark.server
def test_a_failover_gives_the_keys_back(start_cluster, make_tier, monkeypatch, caplog):
    """A master's keys are misses until its replica takes over, and then they are there; nobody has to be told."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(Node, "pauses", (0.05, 0.1))
    monkeypatch.setattr(Topology, "refresh_seconds", 0.05)
    cluster = start_cluster(replicas=[0])
    replica = cluster.servers[3]
    tier = make_tier(",".join(cluster.url.split(",")[:2]))
    assert all(tier.put(KEYS, VALUES, T))
    until(lambda: replica.command("DBSIZE") == cluster.servers[0].command("DBSIZE"))
    cluster.servers[0].kill()
    assert read(tier, timeout=1.0) == expected(cluster, down=0)
    until(lambda: read(tier, timeout=1.0) == VALUES)
    assert tier.put(KEYS, VALUES, T) == [True] * 60
    # The old master comes back as the new one's replica.
    cluster.servers[0].start()
    until(lambda: b"role:slave" in cluster.servers[0].command("INFO", "replication"))
    assert read(tier) == VALUES
