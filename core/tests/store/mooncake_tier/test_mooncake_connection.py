"""Who is inside Mooncake's client, and what memory it has registered: with a client that only takes notes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from kvplug.store.l2.mooncake.connection import Connection, addresses_of
from kvplug.store.l2.tier import TierError


class Notes:
    """Stands in for Mooncake's client."""

    def __init__(self, setup=0, register=0):
        self.codes = SimpleNamespace(setup=setup, register=register)
        self.events = []

    def setup(self, *arguments):
        self.events.append("setup")
        return self.codes.setup

    def register_buffer(self, address, nbytes):
        self.events.append(("register", address, nbytes))
        return self.codes.register

    def unregister_buffer(self, address):
        self.events.append(("unregister", address))
        return 0

    def close(self):
        self.events.append("close")
        return 0


def connect(notes, protocol="tcp"):
    library = SimpleNamespace(MooncakeDistributedStore=lambda: notes)
    return Connection(library, master="master:1", host="host", protocol=protocol, devices="")


def test_a_client_that_is_not_taken_in_is_closed():
    """A set-up that fails leaves no client behind, and the error has the code and the master's address."""
    notes = Notes(setup=-1)
    with pytest.raises(TierError, match=r"master:1.*\(-1\)"):
        connect(notes)
    assert notes.events == ["setup", "close"]


def test_the_client_is_closed_when_the_last_call_has_returned():
    """Closing under two calls closes nothing; the second to return does, once; new calls aren't let in."""
    notes = Notes()
    connection = connect(notes)
    with connection.call():
        with connection.call():
            connection.close(wait=0)
            connection.close(wait=0)
            with pytest.raises(TierError, match="closed"), connection.call():
                pass
        assert "close" not in notes.events
    assert notes.events.count("close") == 1


def test_closing_waits_for_calls():
    """A call that ends in time is waited for: after closing, the memory isn't used any more."""
    notes = Notes()
    connection = connect(notes)
    inside, leave = threading.Event(), threading.Event()

    def work():
        with connection.call():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(30)
    closing = threading.Thread(target=connection.close, args=(30,))
    closing.start()
    assert "close" not in notes.events
    leave.set()
    closing.join(30)
    assert notes.events[-1] == "close"
    thread.join(30)


def test_registered_memory_is_kept_until_the_client_is_closed():
    """The slab can't go while a call that hangs may still write to it, even when the tier was closed."""
    slab = bytearray(100)
    notes = Notes()
    connection = connect(notes)
    connection.register(memoryview(slab))
    with connection.call():
        connection.close(wait=0)
        with pytest.raises(BufferError):
            slab.append(0)
    slab.append(0)
    assert notes.events[-1] == "close"


def test_over_rdma_memory_that_is_not_registered_is_registered_for_the_call():
    """Registered once for two calls that share it, given back by the last; memory inside the slab needs nothing."""
    slab, scratch = memoryview(bytearray(100)), memoryview(bytearray(50))
    (address,) = addresses_of([scratch])
    notes = Notes()
    connection = connect(notes, "rdma")
    connection.register(slab)
    del notes.events[:]
    with connection.call([slab[10:20], scratch]):
        assert notes.events == [("register", address, 50)]
        with connection.call([scratch]):
            pass
        assert notes.events == [("register", address, 50)]
    assert notes.events == [("register", address, 50), ("unregister", address)]


def test_over_tcp_only_the_slab_is_registered():
    """TCP sends from and to any memory."""
    notes = Notes()
    with connect(notes).call([memoryview(bytearray(10))]):
        assert notes.events == ["setup"]


def test_memory_that_is_refused_is_an_error_with_a_remedy():
    """RDMA pins memory, which is limited; nothing stays registered where one of several is refused."""
    notes = Notes(register=-600)
    connection = connect(notes, "rdma")
    with pytest.raises(TierError, match="ulimit -l"):
        connection.register(memoryview(bytearray(10)))
    with pytest.raises(TierError, match="10 bytes"), connection.call([memoryview(bytearray(10))]):
        pytest.fail("it went on")
    connection.close(wait=0)
    assert notes.events[-1] == "close"
    assert not [event for event in notes.events if event[0] == "unregister"]
